"""Products with the matrices that ids choose: of experts."""

from __future__ import annotations

from partita.importing.graph import Value, is_op
from partita.importing.normal.views import viewed


def routed(value: Value) -> Value | None:
    """A product of a value with matrices of a table, one for each id: `w[ids]`."""
    if value.op != "einsum" or len(value.args["xs"]) != 2:
        return None
    for x, w, names, of_w in _both(value):
        table = w
        moved = list(range(w.rank))
        if is_op(w, "permute"):
            table, moved = w.args["x"], w.args["order"]
        if not is_op(table, "embedding") or table.args["table"].rank != 3 or table.args["ids"].constant is not None:
            continue
        ids = table.args["ids"]
        if ids.rank != 1 or moved[0] != 0:
            continue
        own = [of_w[moved.index(dim)] for dim in range(table.rank)]  # letters of the table's dimensions
        out = value.args["out"]
        if own[0] not in names or own[0] not in out:
            continue
        # A matrix of one column is a vector.
        thin = [letter for letter, size in zip(names, x.shape, strict=True) if size == 1 and letter not in own]
        x = viewed(x, x, tuple(size for letter, size in zip(names, x.shape, strict=True) if letter not in thin))
        names = "".join(letter for letter in names if letter not in thin)
        shape = [size for letter, size in zip(out, value.shape, strict=True) if letter not in thin]
        out = "".join(letter for letter in out if letter not in thin)
        args = {"x": x, "w": table.args["table"], "ids": ids, "names": names, "letters": "".join(own), "out": out}
        return viewed(value, value.make("routed", shape, **args))
    return None


def _both(value: Value) -> list[tuple[Value, Value, str, str]]:
    one, two = value.args["xs"]
    first, second = value.args["letters"]
    return [(one, two, first, second), (two, one, second, first)]


RULES = (routed,)
