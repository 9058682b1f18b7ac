"""Pipeline schedules: the records, one module per schedule, and `registry`, which builds them by name."""
