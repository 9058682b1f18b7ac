"""Data: what `train.data` names, as batches that are a pure function of (seed, step).

One file a source, and `registry`. numpy only, and that only where data is opened: sources are known without it.
"""
