"""Published results, and what the cost model says of them."""
