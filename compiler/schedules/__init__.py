"""Schedules: the records, one file for each kind, and `registry`, which makes them by name."""
