"""A file → a small one that runs the same program in miniature."""
