"""`partita run --elastic min=N`: the mesh for as many ranks as there are, with the meaning of the file's own.

No axis of the mesh grows beyond what the file says. Of the meshes that fit, those with most ranks come first, and of
these the one that shrinks the axes which the batch is sharded over: every other axis divides what a rank holds. The
batch stays whole: it is divided into at least as many microbatches as leave a rank no more rows at a time than before.
So a step computes the same, up to rounding, and a checkpoint of any of these meshes fits all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product
from math import ceil, prod

from attrs import frozen

from partita.compiler.pipeline import compile_run
from partita.compiler.state import Compilation
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.load import load
from partita.dsl.spec import BATCH, Mesh, ShardRule, Spec
from partita.dsl.syntax.reader import Reader

MOST_MICROBATCHES = 64  # counts that are tried for one mesh


@frozen
class Fitted:
    """The file for fewer ranks than it declares: overrides, and what they compile to."""

    overrides: tuple[str, ...]
    spec: Spec
    state: Compilation
    evaluation: Compilation | None


def minimum_ranks(text: str) -> int:
    """The least number of ranks with which a run goes on, as an option: `min=N`. Raises ArgumentTypeError."""
    key, _, value = text.partition("=")
    if key != "min" or not value.isdecimal() or not 1 <= int(value) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"`min=N` with N from 1 up, not {text!r}")
    return int(value)


def check_elastic(spec: Spec, minimum: int) -> Mesh:
    """The mesh that may shrink. Raises Refused (E0624) if there is none, or no checkpoint to go on from."""
    mesh, train = spec.mesh, spec.train
    if mesh is None:
        raise refuse("E0624", "--elastic changes the mesh, and the file has none", help="declare a `mesh` and a layout")
    if not 1 <= minimum <= mesh.ranks:
        raise refuse(
            "E0624",
            f"--elastic min={minimum} asks for more ranks than the {mesh.ranks} of mesh `{mesh.name}`",
            mesh.span,
            help=f"a number from 1 to {mesh.ranks}",
        )
    if train is None or train.checkpoint is None:
        raise refuse(
            "E0624",
            "--elastic goes on from checkpoints, and the file saves none",
            train.span if train is not None else None,
            help="`checkpoint = every(100)` in the train block",
        )
    return mesh


def fitted(
    arguments: argparse.Namespace, base: Spec, mesh: Mesh, reader: Reader, ranks: int, gpu: bool, exact: bool = False
) -> Fitted | None:
    """The file for at most that many ranks, or `exact`ly; None if no mesh fits that is not below the minimum."""
    for sizes in _meshes(base, mesh, ranks):
        count = prod(sizes)
        if count < arguments.elastic or (exact and count != ranks):
            return None
        fit = _of_mesh(arguments, base, mesh, reader, sizes, gpu)
        if fit is not None:
            return fit
    return None


def _meshes(base: Spec, mesh: Mesh, ranks: int) -> Iterator[tuple[int, ...]]:
    """The sizes of meshes of at most that many ranks, best first."""
    of_batch = _batch_axes(base)

    def order(sizes: Sequence[int]) -> tuple[int, float, float]:
        shrunk = {name: full / size for (name, full), size in zip(mesh.axes, sizes, strict=True)}
        others = prod(by for name, by in shrunk.items() if name not in of_batch)
        return -prod(sizes), others, max(shrunk.values())

    all_sizes = product(*(range(1, full + 1) for _, full in mesh.axes))
    yield from sorted((sizes for sizes in all_sizes if prod(sizes) <= ranks), key=order)


def _batch_axes(base: Spec) -> set[str]:
    """The mesh axes that the batch is sharded over."""
    batch = base.schedule.batch if base.schedule is not None else BATCH
    rules = base.layout.rules if base.layout is not None else ()
    shards = [rule for rule in rules if isinstance(rule, ShardRule)]
    batch_rules = [rule for rule in shards if any(target.name == batch for target in rule.targets)]
    return {axis for rule in batch_rules for axis in rule.mesh_axes}


def _of_mesh(
    arguments: argparse.Namespace, base: Spec, mesh: Mesh, reader: Reader, sizes: Sequence[int], gpu: bool
) -> Fitted | None:
    shrunk = {name: (full, size) for (name, full), size in zip(mesh.axes, sizes, strict=True) if size != full}
    shape = [f"{mesh.name}.{name}={size}" for name, (_, size) in shrunk.items()]
    by = prod((Fraction(*shrunk[name]) for name in _batch_axes(base) & shrunk.keys()), start=Fraction(1))
    for more in _microbatches(base, by):
        overrides = (*arguments.overrides, *shape, *more)
        spec, _ = load(arguments.file, overrides, arguments.root, Reader(reader.texts))
        if spec is None:
            continue
        try:
            state, evaluation = compile_run(spec, gpu=gpu)
        except Refused:
            continue
        return Fitted(overrides, spec, state, evaluation)
    return None


def _microbatches(base: Spec, by: Fraction) -> Iterator[tuple[str, ...]]:
    """Overrides of the number of microbatches if a rank has so many times more rows: first those that leave it no more
    rows in one than before.
    """
    before = base.schedule.call.arguments.get("microbatches") if base.schedule is not None else None
    if not isinstance(before, int):
        yield ()
        return
    first = ceil(before * by)
    for count in (*range(first, first + MOST_MICROBATCHES), *range(before, first)):
        yield (f"schedule.microbatches={count}",) if count != before else ()
