"""What names refer to: declarations of a file and its imports, scopes, paths, and the names of other programs."""
