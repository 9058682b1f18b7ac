"""The passes, from a checked file to a partitioned graph. `partita.compiler.pipeline` runs them in order."""
