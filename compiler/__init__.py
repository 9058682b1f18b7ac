"""Spec to Program: graph, operations, passes, schedules, laws, simulator, emitter. Imports neither torch nor numpy."""
