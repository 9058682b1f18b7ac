"""Analyses of the partitioned graph and its schedule: lifetimes, memory, time and traffic of a step.

Used by the searches in `fit`, by reports and by the planner.
"""
