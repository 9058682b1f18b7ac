"""Data: what `train.data` names, as batches that are a pure function of (seed, step).

One module per source, and `registry`. Only opening data needs numpy: the sources are declared without it.
"""
