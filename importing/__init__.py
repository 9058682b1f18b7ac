"""A PyTorch module becomes a `.par` file: `partita import`, and `partita.from_torch`.

The way of a module: `capture` exports it to a graph of ATen operations, `normal` says these in the few operations of
this package, `patterns` recognizes what several of them are together, `factors` finds which dimensions are one axis,
`axes` gives the axes names, and `writing` writes blocks, repeats and the model. `prove` compares what was written with
the module.
"""
