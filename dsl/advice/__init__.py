"""Corrections that errors propose, and warnings about what is most likely not meant."""
