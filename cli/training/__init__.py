"""What `partita run` does: as the supervisor of ranks that it starts, as one of them, or as all in one process."""
