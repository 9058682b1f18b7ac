"""`.par` files to start from."""
