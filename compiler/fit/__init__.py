"""What is searched for by what it costs: the order of a schedule, and what is computed again."""
