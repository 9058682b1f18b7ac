"""`partita checkpoint … --as`: the options and names of other programs, and export of a model to one."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from partita.cli.number_format import bytes_text
from partita.cli.source import load_file, report
from partita.compiler.ops.four_bits import CODES
from partita.compiler.passes.build import adapters_of
from partita.compiler.pipeline import compile_spec
from partita.dsl.advice.report import Report, suggestion
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.names.correspondence import Weights
from partita.dsl.names.paths import adapters_in
from partita.dsl.names.weights import Checker, parameters_in, parameters_of
from partita.dsl.spec import Spec
from partita.dsl.syntax import tree
from partita.dsl.syntax.parser import parse_file
from partita.dsl.syntax.source import Source, Span
from partita.dsl.syntax.units import BYTES, Quantity
from partita.dsl.syntax.units import read as read_quantity
from partita.dsl.types import BYTES as WIDTHS
from partita.runtime.addresses import Address, PathOrUrl, exists, place_of, put
from partita.runtime.checkpoint.files import directory, read
from partita.runtime.checkpoint.folders import RemoteFolder
from partita.runtime.checkpoint.manifest import Manifest
from partita.runtime.checkpoint.proposals import template

if TYPE_CHECKING:
    from partita.runtime.checkpoint.adapters import Adapters
    from partita.runtime.checkpoint.four_bits import Parameters
    from partita.runtime.checkpoint.loading import Commit

# What a config calls the dtypes.
DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "f64": "float64"}
PEFT, HF = "peft", "hf"
CAUSAL = ("ForCausalLM", "LMHeadModel")
MOST_CONFIG = 1 << 24  # bytes
SHARD = "5GB"
CONFIG = "config.json"


def add_foreign_arguments(parser: argparse.ArgumentParser, export: bool) -> None:
    """The options of an import or export under the names of another program."""
    parser.add_argument("--as", dest="program", metavar="NAME", help="the names of `weights NAME` in the .par file")
    what = "only the parameters with these names, or in these blocks and repeats"
    parser.add_argument("--only", metavar="PATH,…", type=lambda text: text.split(","), default=[], help=what)
    if export:
        what = "with adapters, the sums of these and the matrices that they are beside"
        parser.add_argument("--merge", action="store_true", help=what)
        parser.add_argument("--dtype", choices=DTYPES, help="cast floats to this dtype (default: as they are)")
        what = f"the most bytes of a file (default: {SHARD})"
        parser.add_argument("--shard-size", type=_size, default=_size(SHARD), metavar="SIZE", help=what)
        what = f"the {CONFIG} to put beside the tensors (default: the one that was imported with them)"
        parser.add_argument("--config", type=place_of, metavar="FILE", help=what)


def _size(text: str) -> int:
    try:
        quantity = read_quantity(text, Span(Source("--shard-size", text), 0, len(text)))
    except (Refused, AssertionError):
        quantity = Quantity(0)
    if quantity.dimension != BYTES or quantity.value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as {SHARD}")
    return int(quantity.value)


def declared(spec: Spec, name: str) -> Weights:
    """The `weights` of a file that have a name. Raises Refused (E0302), proposing what to write."""
    if name not in spec.weights:
        model, _ = spec.trained
        first = next(iter(parameters_of(model)), None)
        line = template(first) if first is not None else ""
        help = suggestion(name, spec.weights) or f"declare it: `weights {name} {{ {line} … }}`, a line a parameter"
        raise refuse("E0302", f"{spec.source.name} has no `weights {name}`", help=help)
    return spec.weights[name]


# ---------------------------------------------------------------- export


def export_as(arguments: argparse.Namespace, commit: Commit) -> None:
    """Export a checkpoint under the names of another program. Raises Refused and OSError."""
    from partita.runtime.checkpoint.adapters import Merged
    from partita.runtime.checkpoint.foreign import export_foreign

    manifest = commit.manifest
    spec = load_file(arguments) if arguments.file is not None else None
    adapters = _saved_adapters(manifest)
    if adapters and arguments.program == PEFT and not (spec is not None and PEFT in spec.weights):
        return _export_adapters(arguments, commit, spec)
    weights = _remembered(manifest, arguments.program) if spec is None else declared(spec, arguments.program)
    if adapters and not arguments.only and not arguments.merge:
        message = f"the checkpoint has adapters, of which `weights {weights.name}` say nothing"
        help = "`--merge` adds them to what they are beside; `--as peft` writes them alone"
        raise refuse("E0809", message, help=help)
    config = arguments.config or commit.path / CONFIG
    more = {}
    if arguments.config is not None or is_file(config):
        floats = {each.type.dtype for each in manifest.tensors if each.type.is_float}
        dtype = arguments.dtype or max(floats, key=WIDTHS.__getitem__, default=None)
        more[CONFIG] = with_dtype(config_of(config), dtype)
    merged = Merged(_adapters(arguments, commit, spec)[0]) if arguments.merge else None
    count, size, warnings = export_foreign(
        merged or _parameters(arguments, commit, spec),
        arguments.output,
        weights,
        arguments.only,
        arguments.dtype,
        arguments.shard_size,
        more,
    )
    report(warnings)
    print(f"{arguments.output}: {count} tensors, {bytes_text(size)} from {commit.path}, step {manifest.step}")
    if not more:
        print(f"without {CONFIG}, which was not imported; `--config FILE` puts one beside them")


def _saved_adapters(manifest: Manifest) -> set[str]:
    """The parameters of adapters in a checkpoint."""
    return adapters_in([each.name for each in manifest.tensors if "/" not in each.name])


def _adapters(arguments: argparse.Namespace, commit: Commit, spec: Spec | None) -> tuple[Adapters, Spec]:
    """The adapters of a commit. Raises Refused (E0302) without the file that says their ranks and factors."""
    from partita.runtime.checkpoint.adapters import Adapters

    if spec is None:
        message = "how much adapters count stands in the .par file"
        raise refuse("E0302", message, help="name the .par file after the directory, with the overrides of the run")
    model, _ = spec.trained
    calls = adapters_of(model)
    if {name.rpartition(".")[0] for name in _saved_adapters(commit.manifest)} != {*calls}:
        message = f"the checkpoint has other adapters than {spec.source.name} declares"
        raise refuse("E0809", message, help="the file, and `adapters=…`, with which the checkpoint was trained")
    return Adapters(_parameters(arguments, commit, spec), calls), spec


def _parameters(arguments: argparse.Namespace, commit: Commit, spec: Spec | None) -> Parameters:
    """The parameters of a commit. Raises Refused (E0302) for matrices in four bits without the file that says so."""
    from partita.runtime.checkpoint.exchange import weights_of
    from partita.runtime.checkpoint.four_bits import Parameters, forms_of

    forms = {}
    if any(each.name.endswith(f".{CODES}") and not each.type.is_float for each in commit.manifest.tensors):
        if spec is None:
            message = "the checkpoint has matrices in four bits, and the .par file says how"
            raise refuse("E0302", message, help="name the .par file after the directory, with the overrides of the run")
        forms = forms_of(compile_spec(spec).program)
    return Parameters(commit, weights_of(commit.manifest, arguments.weights), forms)


def _export_adapters(arguments: argparse.Namespace, commit: Commit, spec: Spec | None) -> None:
    """Export adapters as PEFT has them, beside tensors as the only `weights` say, or those called `hf`."""
    from partita.runtime.checkpoint.adapters import export_peft

    adapters, file = _adapters(arguments, commit, spec)
    weights = declared(file, HF if len(file.weights) != 1 else next(iter(file.weights)))
    place = arguments.config or commit.path / CONFIG
    known = json.loads(config_of(place)) if arguments.config is not None or is_file(place) else {}
    classes = [each for each in known.get("architectures") or () if each.endswith(CAUSAL)]
    base = known.get("_name_or_path") or None
    count, size = export_peft(
        adapters, arguments.output, weights, base, "CAUSAL_LM" if classes else None, arguments.dtype
    )
    print(f"{arguments.output}: {count} tensors, {bytes_text(size)} from {commit.path}, step {commit.manifest.step}")


def _remembered(manifest: Manifest, name: str) -> Weights:
    """The declaration in the files that a checkpoint was trained from. Raises Refused (E0302, E0818)."""
    problems = Report()
    parsed = [parse_file(Source(name, text), Report()) for name, text in manifest.sources.items()]
    written = {each.name.text: each for file in parsed for each in file.declarations if isinstance(each, tree.Weights)}
    if name not in written:
        help = suggestion(name, written) or "name the .par file that has it after the directory"
        raise refuse("E0302", f"the checkpoint was trained from a file without `weights {name}`", help=help)

    def number(expression: tree.Path | tree.Call) -> Quantity:
        message = f"a name in `weights {name}` depends on `{expression.span.text}`, which the command line may have set"
        help = "name the .par file after the directory, with the same overrides as for the run"
        raise refuse("E0818", message, expression.span, help=help)

    types = {each.name: each.type for each in manifest.tensors if "/" not in each.name}
    weights = Checker(manifest.model, parameters_in(types), number, problems).weights(written[name])
    if weights is None:
        raise Refused(problems.diagnostics())
    return weights


# ---------------------------------------------------------------- the config beside the tensors


def is_file(place: PathOrUrl) -> bool:
    """Whether there is a file. Raises OSError."""
    return exists(place) if isinstance(place, Address) else place.is_file()


def config_of(path: PathOrUrl) -> bytes:
    """The content of a config. Raises Refused (E0809) if it is no JSON object, and OSError."""
    if isinstance(path, Address):
        content = RemoteFolder(path.parent).read(path.name, MOST_CONFIG)
    elif path.is_symlink():
        content = path.read_bytes()
    else:
        with directory(path.parent) as handle:
            content = read(path.resolve().name, handle, MOST_CONFIG)
    try:
        if not isinstance(json.loads(content), dict):
            raise ValueError
    except (ValueError, RecursionError):
        raise refuse("E0809", f"{path} is not a JSON object, as a {CONFIG} is") from None
    return content


def write_config(folder: PathOrUrl, content: bytes) -> None:
    """Put a config into a folder. Raises OSError."""
    if isinstance(folder, Address):
        put(folder / CONFIG, content)
    else:
        (folder / CONFIG).write_bytes(content)


def with_dtype(content: bytes, dtype: str | None) -> bytes:
    """A config that says the widest dtype of the tensors beside it, if it says one: programs load them in that one."""
    config = json.loads(content)
    keys = [key for key in ("dtype", "torch_dtype") if key in config]
    if dtype is None or all(config[key] == DTYPES[dtype] for key in keys):
        return content
    return json.dumps({**config, **dict.fromkeys(keys, DTYPES[dtype])}, indent=2).encode() + b"\n"
