"""The grammar of the language, and the parser table made from it."""
