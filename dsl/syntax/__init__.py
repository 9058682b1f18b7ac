"""Text → syntax tree, and back: source files, tokens, parser, tree, canonical form."""
