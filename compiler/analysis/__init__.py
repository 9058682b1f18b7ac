"""What a compiled step needs and takes: lifetimes, memory, time, traffic; of the partitioned graph and a schedule.

Passes that search (`fit`), reports and the planner read it.
"""
