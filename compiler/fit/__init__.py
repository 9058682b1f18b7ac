"""Searches by cost: the order of a schedule, and what is recomputed."""
