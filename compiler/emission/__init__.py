"""Partitioned graph and schedule → Program: source, frames, instructions."""
