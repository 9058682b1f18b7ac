"""Optimizers: `registry`, what one says of itself, and one file each: how files call it, and its update's operation."""
