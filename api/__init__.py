"""Partita: declarative training. The public Python API, for scripts and notebooks.

    import partita

    state = partita.compile("specs/tiny.par", "laptop.pipe=4", "schedule=one_f_one_b")
    print(partita.summary(state).timeline.bubble)
    assert partita.verify("specs/tiny.par").passed
    trained = partita.train("specs/tiny.par", {"train.steps": 20})
    print(trained[-1]["loss"], sorted(trained.parameters))
    print(trained.outputs({"tokens": tokens})["logits"])

Overrides are strings as on the command line, or mappings from keys to values. For an invalid file, functions raise
`partita.Refused` with diagnostics; for a wrong argument, TypeError or ValueError, which name it. Torch is not imported
before a program is run; functions that need it raise ImportError where it is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.arguments import by_name, callback, count, file_at, flag, folder_at, instance, optional_word, seconds, word
from partita.dsl.config.python_calls import called_from_python, in_python
from partita.dsl.diagnostic import Diagnostic, Refused, refuse
from partita.dsl.load import load as load_file
from partita.dsl.load import spec_of
from partita.dsl.version import __version__ as __version__
from partita.overrides import Override, written

if TYPE_CHECKING:
    from torch import Tensor, nn

    from partita.compiler.planner.search import Plan
    from partita.compiler.report.summary import Summary
    from partita.compiler.state import Compilation
    from partita.dsl.spec import Spec
    from partita.runtime.trained import Trained, TrainedModel
    from partita.runtime.verification.verify import Verification

__all__ = [
    "Diagnostic",
    "Refused",
    "check",
    "compile",
    "from_torch",
    "load",
    "load_model",
    "outputs",
    "plan",
    "summary",
    "train",
    "verify",
]


def __dir__() -> list[str]:
    """What is public, for completion."""
    return sorted([*__all__, "__version__"])


@called_from_python
def check(path: str | Path, *overrides: Override) -> tuple[Diagnostic, ...]:
    """All errors and warnings of a file, with `key=value` overrides applied."""
    return tuple(in_python(each) for each in load_file(file_at(path), written(overrides))[1])


@called_from_python
def load(path: str | Path, *overrides: Override) -> Spec:
    """The checked contents of a file."""
    return _load(path, overrides)


@called_from_python
def compile(path: str | Path, *overrides: Override) -> Compilation:
    """Compile a file for training. Returns the program and every intermediate form."""
    from partita.compiler.pipeline import compile_run

    return compile_run(load(path, *overrides))[0]


def summary(state: Compilation) -> Summary:
    """A summary of a compiled program: stages, transfers, memory, predicted timeline."""
    from partita.compiler.report.summary import summarize
    from partita.compiler.state import Compilation

    return summarize(instance("state", state, Compilation, "what `partita.compile` returns"))


@called_from_python
def plan(
    path: str | Path, *overrides: Override, devices: int | None = None, top: int = 10, within: float = 15.0
) -> tuple[Plan, ...]:
    """The `top` meshes, layouts and schedules that are predicted to be fastest on `devices` devices (default: the
    mesh's), best first, from a search of about `within` seconds. Each has its `file`, a Spec, and its `prediction`;
    the one that is `given` is the file itself.
    """
    from partita.compiler.planner.search import Search
    from partita.compiler.planner.space import space_of

    devices = count("devices", devices) if devices is not None else None
    top, within = count("top", top), seconds("within", within)
    return Search(space_of(_load(path, overrides, fitting=False), devices), top, within).run().plans


@called_from_python
def verify(path: str | Path, *overrides: Override, allow_python: bool = False) -> Verification:
    """Verify a file as `partita verify` does: translation validation, memory, claims, and a run of a proxy.

    The Python code of its own operations runs only with `allow_python`.
    """
    _require("verify")
    from partita.runtime.verification.verify import verify as verify_spec

    return verify_spec(load(path, *overrides), flag("allow_python", allow_python))


@called_from_python
def train(
    path: str | Path,
    *overrides: Override,
    run_dir: str | Path | None = None,
    allow_python: bool = False,
    changed_data: bool = False,
    on_step: Callable[[dict[str, Any]], object] | None = None,
) -> Trained:
    """Train with all ranks in this process, on the virtual transport. Returns a record for each step, and the model.

    `on_step` is called with the record of each step, when it is done.

    If the file has `checkpoint`, the run resumes from the newest checkpoint in its directory, `run_dir` or `runs/NAME`,
    and saves there, as `partita run` does; with other data than it was trained on only with `changed_data`. Otherwise
    nothing is written, except `metrics.jsonl` to a given `run_dir`. Problems with checkpoints are issued as Python
    warnings. The Python code of the file's own operations runs only with `allow_python`.

    For small models; to train on several processes or machines use `partita run`.
    """
    _require("train")
    from partita.runtime.trained import train as train_spec

    run_dir, on_step = folder_at("run_dir", run_dir), callback("on_step", on_step)
    allow_python, changed_data = flag("allow_python", allow_python), flag("changed_data", changed_data)
    spec, folder = load(path, *overrides), Path(path).resolve().parent
    return train_spec(spec, folder, run_dir, allow_python, changed_data, on_step)


@called_from_python
def load_model(
    path: str | Path,
    *overrides: Override,
    run_dir: str | Path | None = None,
    names: Sequence[str] = (),
    weights: str = "trained",
    allow_python: bool = False,
    run: str | Path | None = None,
) -> TrainedModel:
    """The trained model of a file, on this machine's CPU: a function of inputs by name, for any number of rows, that
    returns its outputs of these `names`, or all, by name.

    Weights are of the newest checkpoint in the run's directory, by default `runs/NAME`; `run_dir` may also be a
    directory of checkpoints or a single one (`run` is its former name). With `weights` "ema" they are the means that
    were kept. Problems with checkpoints are issued as Python warnings. Raises Refused: also if there is no checkpoint
    of this model.
    """
    _require("load_model")
    from partita.runtime.trained import load_model as load_trained

    run_dir = folder_at("run", run) if run_dir is None else folder_at("run_dir", run_dir)
    weights = word("weights", weights, ("trained", "ema"))
    allow_python = flag("allow_python", allow_python)
    spec, folder = load(path, *overrides), Path(path).resolve().parent
    return load_trained(spec, folder, run_dir, names, weights, allow_python)


@called_from_python
def outputs(
    path: str | Path,
    *overrides: Override,
    parameters: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    names: Sequence[str] = (),
) -> dict[str, Tensor]:
    """The model's outputs of these `names`, or all, for one batch on this machine's CPU: `parameters` (with buffers) by
    full name, as `train` returns them, and `inputs` by name. What no output reads may be left out.

    Tensors have their axes in the order of their types in the file. Raises ValueError if one is missing or has another
    shape, and TypeError for what is no tensor.
    """
    _require("outputs")
    from partita.runtime.outputs import outputs as outputs_of

    return outputs_of(load(path, *overrides), parameters, inputs, names)


@called_from_python
def from_torch(
    module: nn.Module,
    example_inputs: Mapping[str, Tensor],
    loss: str | None = None,
    axes: Mapping[str, list[str]] | None = None,
    name: str | None = None,
    prove: bool = True,
    tables: str | Path | None = None,
) -> str:
    """The text of a `.par` file that computes what a module computes, as `partita import` writes it.

    `example_inputs` are keyword arguments of `forward`, with at least two rows; their sizes are those of the file. Of a
    module that returns outputs alone, `loss` is `cross_entropy(logits, targets)`, `mse(a, b)` or
    `binary_cross_entropy(logits, targets)`, of keys of what it returns and of inputs. `axes` names the axes of inputs,
    `{"tokens": ["batch", "seq"]}`, and `name` the model. Unless `prove` is False, the file is compared with the module:
    loss, outputs, every gradient, and buffers after a step, in f64 at several sizes. Constants that no formula says are
    written to `tables`, a file of safetensors which the text reads by its name.

    Raises TypeError or ValueError for a wrong argument, and Refused for a module that cannot be called, is not
    understood, or is not equal to its file (E1201 to E1204).
    """
    _require("from_torch")
    from safetensors.torch import save_file
    from torch import Tensor, nn

    from partita.importing.from_torch import example_of, file_and_proof, file_of

    module = instance("module", module, nn.Module, "an `nn.Module`")
    inputs = by_name("example_inputs", example_inputs, Tensor, "tensors, keyword arguments of `forward`")
    loss = optional_word("loss", loss, "a text such as `cross_entropy(logits, targets)`")
    if axes is not None:
        axes = by_name("axes", axes, list, "lists of names")
    name, prove = optional_word("name", name, "the name of the model"), flag("prove", prove)
    beside = folder_at("tables", tables, "a file")
    example = example_of(module, inputs, loss)
    file = file_and_proof(example, name, axes)[0] if prove else file_of(example, name, axes)
    if beside is None and file.tables:
        help = f'`tables = "{file.program.model.name}.safetensors"` says where to write them'
        raise refuse("E1202", f"constants of the module have no formula: {', '.join(file.tables)}", help=help)
    if beside is None:
        return file.text
    save_file(file.tables, beside)
    return file.with_tables(Path(beside).name)


def _require(function: str) -> None:
    """Raise ImportError, which says how to install it, if this installation cannot run programs."""
    from partita.cli.extras import missing

    problem = missing("run", f"`partita.{function}`")
    if problem is not None:
        raise ImportError(problem)


def _load(path: str | Path, overrides: Sequence[Override], fitting: bool = True) -> Spec:
    return spec_of(load_file(file_at(path), written(overrides), fitting=fitting))
