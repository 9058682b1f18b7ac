"""What `partita doctor` examines: the machine, its GPUs, and what ranks on them can do."""
