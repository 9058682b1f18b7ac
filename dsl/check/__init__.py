"""Syntax tree → `Spec`: sizes, types, layouts, schedules, and what can be checked of them without compiling."""
