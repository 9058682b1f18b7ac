"""The graph of one step → the same with a layout for every value: homes, ways, moves, copies."""
