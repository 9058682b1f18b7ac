"""The data that a trained model is used on: a file that the user names, or what the .par file evaluates."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve, frozen

from partita.dsl.check.language_model import sources_of
from partita.dsl.config.builtins import ALL
from partita.dsl.diagnostic import refuse
from partita.dsl.spec import Call, Spec, Train
from partita.runtime.addresses import PathOrUrl
from partita.runtime.data.dataset import Dataset, Input
from partita.runtime.data.registry import Use, open_dataset, with_training_arguments

# The arguments by which sources name their files.
PATHS = ("path", "glob")


@frozen
class Data:
    """All rows of the data of a call, or, without one, of what a run holds out. Paths are relative to `root`."""

    call: Call | None
    root: Path

    def opened(self, train: Train, inputs: tuple[Input, ...], allow_python: bool = False) -> tuple[Dataset, int]:
        """The rows for some inputs, as what is held out of a dataset, and their number. Raises Refused (E06xx)."""
        call, use = (train.data, Use.HOLD_OUT) if self.call is None else (self.call, Use.EVALUATE)
        dataset = open_dataset(call, inputs, train.seed, self.root, use=use, allow_python=allow_python)
        if dataset.held_out is None:
            raise refuse("E0608", "this data has no end", call.span, help="name other data: `--data rows.npz`")
        return dataset, dataset.held_out

    def evaluated_by(self, spec: Spec) -> Spec:
        """The file with an evaluation of all of this data."""
        _, train = spec.trained
        arguments = {"interval": 1, "batches": ALL, "data": self.call, "weights": "trained", "sample": None}
        span = train.eval.span if train.eval is not None else train.data.span
        # What is trained on is not read; it lies where the rest does.
        data = train.data if self.call is None else self.call
        return evolve(spec, train=evolve(train, data=data, eval=Call("every", arguments, span)))


def data_of(spec: Spec, folder: Path, named: PathOrUrl | None) -> Data:
    """The data in a file that the user has `named`, by its path or address: an archive with an array for each input, or
    what the .par file, which is in a `folder`, would read in place of its own. Without it, the file's data for
    evaluations.
    """
    _, train = spec.trained
    if named is None:
        own = train.eval.arguments.get("data") if train.eval is not None else None
        if own is not None:
            return Data(with_training_arguments(own, train.data, folder), folder)
        for source in sources_of(train.data):
            if not source.arguments.get("holdout"):
                message = "nothing is held out of this data, and no other is named"
                raise refuse("E0608", message, source.span, help="name data: `--data rows.npz`")
        return Data(None, folder)
    place = named if isinstance(named, Path) else str(named)
    if named.name.endswith(".npz"):
        return Data(Call("arrays", {"path": place}), folder)
    path = next((name for name in PATHS if name in train.data.arguments), None)
    if path is None or train.data.name == "arrays":
        raise refuse(
            "E0603",
            f"`{named}` is not a numpy archive, and `{train.data.name}` reads no such files",
            train.data.span,
            help='`numpy.savez("rows.npz", …)`, with an array for each input of the model',
        )
    arguments = {name: value for name, value in train.data.arguments.items() if name != "holdout"}
    return Data(with_training_arguments(Call(train.data.name, {**arguments, path: place}), train.data, folder), folder)
