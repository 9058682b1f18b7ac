"""Textual forms of the results of passes: for people, and parsed back in tests of passes."""
