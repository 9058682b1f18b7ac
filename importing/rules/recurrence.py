"""Recurrent layers of torch, as blocks with a scan."""

from __future__ import annotations

from partita.importing.factors import Dim, Solver, factors
from partita.importing.graph import Value
from partita.importing.said import Said, says
from partita.importing.writing.body import Declared
from partita.importing.writing.writer import Writer

GATES = {"lstm": "ifgo", "gru": "rzn", "rnn_tanh": "h", "rnn_relu": "h"}


@factors("recurrent")
def _recurrent(solver: Solver, value: Value) -> list[Dim]:
    dims, args = solver.dims[value.args["x"]], value.args
    hidden = solver.dims[args["inputs"][0]][0]
    batch = [dim for i, dim in enumerate(dims[:-1]) if i != args["time"]]
    for state in args["begin"]:
        for own, dim in zip(solver.dims[state], [*batch, hidden], strict=True):
            solver.unify(own, dim, value)
    for weight in args["inputs"]:
        solver.unify(solver.dims[weight][0], hidden, value)
        solver.unify(solver.dims[weight][1], dims[-1], value)
    for weight in args["states"]:
        solver.unify(solver.dims[weight][0], hidden, value)
        solver.unify(solver.dims[weight][1], hidden, value)
    for bias in (*args["input_biases"], *args["state_biases"]):
        solver.unify(solver.dims[bias][0], hidden, value)
    return [*dims[:-1], hidden]


@factors("cells")
def _cells(solver: Solver, value: Value) -> list[Dim]:
    return solver.dims[value.args["x"]]


@says("recurrent")
def _say_recurrent(write: Writer, value: Value) -> Said:
    """Each gate has weights of its own; torch keeps those of all together. Cells that are read are returned, too."""
    args, kind = value.args, value.args["kind"]
    time = args["time"]
    several = [i for i in range(value.rank - 1) if i != time and write.is_called_again(value, args["states"][0])]
    x, (seq, *_) = write.single(write(args["x"]), [time, *several])  # calls of one block have the same axes
    (inputs,), (hidden,) = x.dims[-1], write.names_of(value)[-1]
    before = write.second(hidden)
    same = inputs == hidden  # what it reads has the axis of the state, which a weight cannot have twice
    inputs = before if same else inputs
    declared = []

    def declare(
        prefix: str, values: list[Value], *dims: tuple[str, ...], first: tuple[int, ...] = ()
    ) -> dict[str, str]:
        names = {}
        for gate, own in zip(GATES[kind], values, strict=True):
            names[gate] = f"{prefix}{gate}"
            declared.append(Declared(names[gate], dims, write.initial(own), own, first=first))
        return names

    w = declare("w", args["inputs"], (hidden,), (inputs,), first=(1,))
    u = declare("u", args["states"], (hidden,), (before,), first=(1,))
    b = declare("b", args["input_biases"], (hidden,)) if args["input_biases"] else {}
    c = declare("c", args["state_biases"], (hidden,)) if args["state_biases"] else {}

    def of_input(gate: str) -> str:
        return f"dot(x, {w[gate]}, over = {inputs})" + (f" + {b[gate]}" if b else "")

    def of_state(gate: str) -> str:
        return f"dot(p, {u[gate]}, over = {before})" + (f" + {c[gate]}" if c else "")

    rest = [name for name in x.axes if name not in (seq, inputs)]
    lines = [f"let x = rename(x, {hidden} -> {before})"] if same else []
    states = [*rest, hidden]
    begin = [write.expanded(each, [n for n in states if n not in each.axes]) for each in map(write, args["begin"])]
    lines += [] if begin else [f"let h = zeros([{', '.join(states)}])"]
    step = [f"let p = rename(h, {hidden} -> {before})"]
    if kind == "lstm":
        lines += [] if begin else ["let c = h"]
        for gate in "ifgo":
            step.append(f"let {gate} = {'tanh' if gate == 'g' else 'sigmoid'}({of_input(gate)} + {of_state(gate)})")
        step += ["let c = f * c + i * g", "let h = o * tanh(c)"]
    elif kind == "gru":
        step += [f"let {gate} = sigmoid({of_input(gate)} + {of_state(gate)})" for gate in "rz"]
        step += [f"let n = tanh({of_input('n')} + r * ({of_state('n')}))", "let h = (1 - z) * n + z * h"]
    else:
        step.append(f"let h = {kind.removeprefix('rnn_')}({of_input('h')} + {of_state('h')})")
    lines += [f"scan {seq}{' backward' if args['backward'] else ''} {{", *step, "}"]
    lines.append("return h, c" if write.has_cells(value) else "return h")
    text = write.own_block(value, kind.partition("_")[0], [x, *begin], declared, lines, ("x", "h", "c"))
    made = Said(text, (*x.dims[:-1], (hidden,)), (seq, *rest, hidden))
    for dim in (time, *several):
        made = write.split(made, dim, write.names_of(value)[dim])
    return made
