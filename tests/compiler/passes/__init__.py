"""Passes of the compiler by example: text in, a pass, text expected. `cases` reads and runs them.

A case is a file `<pass>/<what holds>.txt`:

    # What holds, and why it matters.
    graph m
    …
    --- shard(mesh='data=2', rules='shard batch -> data')
    graph m
    …

Above the line stands a graph, or a `.par` file for `build`; below it what the pass makes of it, or the error with which
it refuses. Several passes on the line run in their order. `python -m tests.compiler.passes` rewrites what is expected;
read what it has written, line by line: it is right only if it says what the comment says.
"""
