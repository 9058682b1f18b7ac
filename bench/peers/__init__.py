"""What others run, with the same arithmetic, weights and data."""
