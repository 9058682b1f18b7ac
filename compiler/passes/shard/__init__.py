"""Sharding: assigns a layout to every value, and makes every layout change a node."""
