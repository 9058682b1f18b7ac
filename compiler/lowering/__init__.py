"""Spec → the graph of one step on one device: expanded, staged, differentiated, recomputed, cut in time."""
