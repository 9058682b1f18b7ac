"""Optimizers: the `registry`, and a module for each with its signature and its update operation."""
