"""`plan`: which mesh, layout and schedule a model trains fastest with on so many devices.

space        what is searched: the roles of mesh axes, the axes that may be split, and each candidate's file
miniature    the figures of one stage and of one turn, from a copy of the model with a few turns
estimate     a candidate's time and memory, composed of these
search       the search: bounds, then miniatures, then the candidates themselves, the most promising first
writing      the file of a candidate
"""
