"""`partita verify`: the proofs of a file, and its miniature run against one device."""
