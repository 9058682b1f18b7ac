"""`python("source.py:row", rows, holdout)`: rows that a Python function makes, each by itself, from a seed and its
number.

`row(seed, number)` returns a dictionary with a number or an array for each input of the model, without the batch axis.
Numbers count the rows of all batches, from 0 on, without end. With `rows = N` there are N of them: training goes
through those that are not held out in a new order every epoch, each epoch with another seed, and evaluation through the
others.
"""

from __future__ import annotations

from os.path import relpath
from pathlib import Path

from partita.dsl.config.builtins import COUNT, HOLDOUT, PythonName, Setting
from partita.dsl.spec import Call
from partita.runtime.data.registry import Source, opened_by, register


def _file(call: Call, root: Path) -> list[tuple[str, Path]]:
    path = Path(call.arguments["function"].source.name)
    return [(relpath(path, root), path)]


register(
    Source(
        "python",
        (Setting("function", PythonName()), Setting("rows", COUNT, None), HOLDOUT),
        example='python("source.py:row")',
        open=opened_by("python_rows", "open_python"),
        files=_file,
    )
)
