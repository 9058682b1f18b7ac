"""Partitioned graph and schedule → Program: statements, segments, source, frames, instructions."""
