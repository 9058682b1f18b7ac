"""Experiment trackers: a process of its own follows a run's `metrics.jsonl` and hands its records to them.

So nothing that a tracker does, however slow it is or however it fails, holds the run up or ends it; and it has the
machine's network, which the ranks that a supervisor starts do not have. One file for each tracker.
"""
