"""Connectionist temporal classification (Graves et al., ICML 2006): a scan over frames.

A state stands for a blank or a label: `blank, a, blank, b, blank` are those of the labels `a, b`. From frame to frame a
state stays, or goes to the next one, or from a label to another one over the blank between.
"""

from __future__ import annotations

from attrs import evolve

from partita.importing.factors import Dim, Solver, factors
from partita.importing.graph import Value
from partita.importing.said import CALL, Said, says
from partita.importing.writing.writer import Writer

LOW = "-1e30"  # the logarithm of no probability, of which gradients are numbers


@factors("ctc_loss")
def _ctc_loss(solver: Solver, value: Value) -> list[Dim]:
    _, batch, _ = solver.dims[value.args["log_p"]]
    for name in ("targets", "frames", "lengths"):
        solver.unify(solver.dims[value.args[name]][0], batch, value)
    return [batch]


@says("ctc_loss")
def _say_ctc_loss(write: Writer, value: Value) -> Said:
    args = value.args
    log_p, (time, classes) = write.single(write(args["log_p"]), [0, 2])
    targets, (labels,) = write.single(write(args["targets"]), [1])
    frames, lengths = write(args["frames"]), write(args["lengths"])
    states = write.computed("states", f"2 * {labels} + 1", 2 * write.size_of(labels) + 1)
    of_state = ", ".join([states, *(name for name in targets.axes if name != labels)])
    step, own_frames = "logaddexp(logaddexp(h, next), skip) + e", frames.dtype != "number"
    runs = f"iota({time}) < {f'expand(ends, {time})' if own_frames else frames.text}"
    every = not own_frames and frames.text == str(write.size_of(time))
    lines = [
        f"let is_label = remainder(iota({states}), 2) == 1",
        f"let own = gather(targets, minimum(floor_divide(iota({states}), 2), size({labels}) - 1), along = {labels})",
        f"let own = where(is_label, own, {args['blank']})",
        f"let over_blank = is_label and iota({states}) > 1 and own != shift(own, over = {states}, by = 2)",
        f"let e = gather(log_p, own, along = {classes})",
        *([] if every else [f"let runs = {runs}"]),
        f"let h = where(iota({states}) == 0, zeros([{of_state}]), {LOW})",
        f"scan {time} {{",
        f"let next = where(iota({states}) > 0, shift(h, over = {states}, by = 1), {LOW})",
        f"let skip = where(over_blank, shift(h, over = {states}, by = 2), {LOW})",
        f"let h = {step if every else f'where(runs, {step}, h)'}",
        "}",
        f"let h = gather(h, size({time}) - 1, along = {time})",
        f"let label = gather(h, maximum(2 * lengths - 1, 0), along = {states})",
        f"let ended = logaddexp(gather(h, 2 * lengths, along = {states}), where(lengths > 0, label, {LOW}))",
        f"return {'where(ended < -1e29, 0.0, -ended)' if args['zero'] else '-ended'}",
    ]
    given = {"log_p": log_p, "targets": targets, **({"ends": frames} if own_frames else {}), "lengths": lengths}
    text = write.own_block(value, "ctc_loss", [*given.values()], [], lines, [*given])
    return evolve(lengths, text=text, binds=CALL, dtype=log_p.dtype)
