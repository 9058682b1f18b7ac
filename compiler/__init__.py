"""From spec to program: graph, ops, passes, schedules, simulator, codegen. Imports neither torch nor numpy."""
