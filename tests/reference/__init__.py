"""What a file means: an interpreter of checked specs in plain torch, and random programs that are held against it."""
