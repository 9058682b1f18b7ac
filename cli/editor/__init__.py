"""What editors need: the language server of `partita lsp`, and a lexer for highlighting."""
