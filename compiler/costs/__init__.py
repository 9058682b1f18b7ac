"""The cost model: records of devices and links, and the times of operations, collectives and transfers."""
