"""`partita run`: as the supervisor of the ranks that it starts, as one of them, or with all ranks in one process."""
