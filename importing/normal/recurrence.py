"""Recurrent layers: one operation for each layer and direction."""

from __future__ import annotations

from partita.importing.graph import Value, number
from partita.importing.normal.arguments import Arguments, several
from partita.importing.normal.views import selected, viewed

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@several("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
def _recurrence(value: Value, a: Arguments, index: int) -> Value:
    """The output, or the last states or cells, of layers of a recurrent module."""
    kind = a.value.op.partition(".")[0]
    x, weights = a["input"], list(a["params"])
    begin = a["hx"]
    states = begin if isinstance(begin, list) else [begin]
    states = [] if all(number(each) == 0 for each in states) else states
    biases, layers, rate = bool(a["has_biases"]), int(a["num_layers"]), float(a["dropout"])
    drops, directions = rate if a["train"] else 0.0, 2 if a["bidirectional"] else 1
    time = 1 if a["batch_first"] else 0
    if a.value.results is None:  # all of its results are those of the same layers
        a.value.results = _layers(value, x, kind, weights, states, biases, layers, drops, directions, time)
    x, every = a.value.results
    if index == 0:
        output: Value = x
        return output
    last = []
    for made in every:
        of_time = made if index == 1 else value.make("cells", made.shape, made.dtype, x=made)
        end = selected(value, of_time, time, 0 if made.args["backward"] else -1)
        last.append(viewed(value, end, (1, *end.shape)))
    return last[0] if len(last) == 1 else value.make("concat", xs=last, dim=0)


def _layers(
    value: Value,
    x: Value,
    kind: str,
    weights: list[Value],
    states: list[Value],
    biases: bool,
    layers: int,
    drops: float,
    directions: int,
    time: int,
) -> tuple[Value, list[Value]]:
    """The output of the last layer, and that of each layer and direction."""
    each = 4 if biases else 2
    every: list[Value] = []
    for layer in range(layers):
        made = []
        for direction in range(directions):
            at = (layer * directions + direction) * each
            own = weights[at : at + each]
            parts = [_parts(weight, GATES[kind]) for weight in own]
            args = {
                "kind": kind,
                "x": x,
                "begin": [selected(value, each, 0, layer * directions + direction) for each in states],
                "inputs": parts[0],
                "states": parts[1],
                "input_biases": parts[2] if biases else [],
                "state_biases": parts[3] if biases else [],
                "time": time,
                "backward": direction == 1,
            }
            shape = (*x.shape[:-1], own[1].shape[1])
            made.append(value.make("recurrent", shape, x.dtype, **args))
        every += made
        x = made[0]
        if directions == 2:
            wide = (*x.shape[:-1], 2 * x.shape[-1])
            x = value.make("concat", wide, x.dtype, xs=made, dim=x.rank - 1)
        if drops and layer + 1 < layers:
            x = value.make("dropout", x.shape, x.dtype, x=x, rate=drops)
    return x, every


def _parts(weight: Value, count: int) -> list[Value]:
    """The parts of a weight that has one for each gate."""
    if count == 1:
        return [weight]
    size = weight.shape[0] // count
    shape = (size, *weight.shape[1:])
    return [
        Value(
            "part",
            {"of": weight, "dim": 0, "start": i * size, "number": i, "within": 1},
            shape,
            weight.dtype,
            weight.place,
            weight.position,
        )
        for i in range(count)
    ]
