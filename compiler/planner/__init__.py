"""`plan`: the mesh, layout and schedule with which a model trains fastest on a given number of devices.

space        the search space: roles of mesh axes, shardable axes, and the file of each candidate
proxy        the costs of one stage and of one layer, from a copy of the model with a few layers
estimate     a candidate's time and memory, composed of these
moves        candidates that differ from one in one thing, for what bounds do not go through
search       the search: bounds, then estimates from proxies, then compiled candidates, the most promising first
sensitivity  what would have to be true of links and devices for the second best plan to be the best
reasons      why a plan is slower than the best
writing      the file of a plan
"""
