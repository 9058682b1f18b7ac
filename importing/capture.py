"""Module → graph of ATen operations, by `torch.export`: functional, with composite operations whole."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from traceback import extract_tb
from types import BuiltinFunctionType
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn
from torch.export import default_decompositions
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import TreeSpec

from partita.importing import dropping
from partita.importing.draws import is_draw, is_dropping
from partita.importing.evaluation import draws_in_training_alone, in_evaluation
from partita.importing.graph import Call, Captured, Line, NotUnderstood, Place, Value, order
from partita.importing.loops import roll
from partita.importing.normal.arguments import known
from partita.importing.substitutes import exported

ASSIGNED = re.compile(r"^(\w+(?:\s*,\s*\w+)*)\s*=\s*[^=]")
FRAME = re.compile(r'\s*File "(.*)", line (\d+), in (.*)')
# Files whose lines are not of a module.
NOT_THEIRS = ("/torch/", os.path.join(os.path.dirname(__file__), ""))
# Of a tensor these read its shape alone.
FILLED = [getattr(torch.ops.aten, f"{each}_like") for each in ("zeros", "ones", "full")]
FILLED += [getattr(torch.ops.aten, f"new_{each}") for each in ("zeros", "ones", "full")]
# Buffers that training changes, if not this call.
KEPT = ("running_mean", "running_var")


def capture(
    module: nn.Module, inputs: Mapping[str, Tensor], loss_alone: bool = False, rolled: bool = False
) -> Captured:
    """The graph of a module's `forward` with these keyword arguments; with other outputs than the loss, unless it shall
    be alone. Loops over a dimension are unrolled, or `rolled` up again, if there are any. Raises NotUnderstood where it
    cannot be exported: a branch that depends on data, for instance.
    """
    captured = _captured(module, inputs)
    if module.training and any(is_draw(each.op) for each in order(captured.outputs)):
        with evaluating(module):
            evaluated = _captured(module, inputs)
        if draws_in_training_alone(captured, evaluated):
            in_evaluation(captured, evaluated)
            captured.evaluated = True
    captured.loss_alone, captured.rolled = loss_alone, rolled and roll(captured)
    lower = {name.lower(): name for name in inputs}  # as a graph has names
    for value in captured.inputs:
        value.args["name"] = lower.get(value.args["name"], value.args["name"])
        value.args["negative"] = bool((inputs[value.args["name"]] < 0).any())
    return captured


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Within it, a module is in evaluation, with all modules that were in training."""
    trained = [each for each in module.modules() if each.training]
    module.eval()
    try:
        yield
    finally:
        for each in trained:
            each.training = True


def _captured(module: nn.Module, inputs: Mapping[str, Tensor]) -> Captured:
    try:
        program = exported(module, inputs)
        for part in program.graph_module.modules():
            if isinstance(part, torch.fx.GraphModule):
                _detach_regions(part)
        program = program.run_decompositions(_decompositions())
    except Exception as error:
        raise NotUnderstood(_reason(error), Place((), _frames(error))) from error
    return _Capturing(program, _names_of(module)).captured()


def _detach_regions(module: torch.fx.GraphModule) -> None:
    """Detach what is computed without gradients: decomposing dissolves regions, and forgets that of them."""
    graph = module.graph
    for node in list(graph.nodes):
        if str(node.target) != "wrap_with_set_grad_enabled" or node.args[0] is not False:
            continue
        for result in list(node.users):
            with graph.inserting_after(result):
                detached = graph.call_function(torch.ops.aten.detach.default, (result,))
            detached.meta = dict(result.meta)
            result.replace_all_uses_with(detached, delete_user_cb=lambda user, own=detached: user is not own)
    module.recompile()


def _decompositions() -> Any:
    """How torch takes operations apart that this package does not know."""
    table, understood = default_decompositions(), known()
    for operation in list(table):
        if str(operation).removeprefix("aten.") in understood:
            del table[operation]
    return table


def _reason(error: Exception) -> str:
    if isinstance(error, GuardOnDataDependentSymNode):
        return "what is computed depends on numbers in tensors, as in `if x.sum() > 0`"
    if "fake tensor in the exported program" in str(error):
        return "the module keeps tensors from one call to the next"
    reason = next((line for line in str(error).split("\n") if line.strip()), type(error).__name__)
    return f"torch.export: {reason.strip()}"


def _frames(error: Exception) -> tuple[Line, ...]:
    """The lines of the module through which an error came."""
    files = ((frame.filename, frame.lineno or 0) for frame in extract_tb(error.__traceback__))
    return tuple(Line(file, number) for file, number in files if not any(each in file for each in NOT_THEIRS))


class _Capturing:
    def __init__(self, program: torch.export.ExportedProgram, names: Mapping[str, list[str]]) -> None:
        self.program, self.names = program, names
        self.result = Captured()
        self.specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        self.state: dict[str, Any] = {**program.constants, **program.state_dict}
        self.parameters: dict[tuple[int, tuple[int, ...]], Value] = {}
        self.buffers: dict[str, Value] = {}
        self.position = self.draws = 0

    def captured(self) -> Captured:
        returned = self._walk()
        outputs = self.program.graph_signature.output_specs
        names = iter(_names(self.program.call_spec.out_spec))
        for value, spec in zip(returned, outputs, strict=True):
            if spec.kind is OutputKind.USER_OUTPUT:
                name, depth = next(names)
                if isinstance(value, Value):
                    self.result.outputs.append(value)
                    self.result.names.append(name)
                    self.result.depths.append(depth)
            elif spec.kind is OutputKind.BUFFER_MUTATION:
                self.result.updates[str(spec.target)] = value
            else:
                raise NotUnderstood(f"the module changes `{spec.target}`")
        for name, value in self.result.updates.items():
            if not any(each.op.startswith("_native_batch_norm") for each in value.inputs):
                self.result.change(self.buffers[name], value)
        return self.result

    def _walk(self) -> Any:
        found: dict[torch.fx.Node, Any] = {}
        for node in self.program.graph_module.graph.nodes:
            if node.op == "placeholder":
                found[node] = self._leaf(node)
            elif node.op == "get_attr":
                attribute = getattr(self.program.graph_module, str(node.target))
                found[node] = self._constant(str(node.target), attribute)
            elif node.op == "call_function":
                found[node] = self._call(node, found)
            elif node.op == "output":
                return _mapped(node.args[0], found)
        raise AssertionError("a graph ends with its output")

    def _leaf(self, node: torch.fx.Node) -> Value:
        spec = self.specs[node.name]
        if spec.kind is InputKind.USER_INPUT:
            value = self._value("input", {"name": node.name}, node.meta["val"], Place())
            self.result.inputs.append(value)
            return value
        tensor = self.state[str(spec.target)].detach()
        if spec.kind is InputKind.PARAMETER:
            key = (tensor.data_ptr(), tuple(tensor.shape))
            tied = self.parameters.get(key)
            if tied is not None:
                names = tied.args["names"]
                names += [each for each in self._every_name(spec) if each not in names]
                return tied
            trained = self.state[str(spec.target)].requires_grad
            args = {"names": self._every_name(spec), "data": tensor, "trained": trained}
            self.parameters[key] = self._value("parameter", args, tensor, Place())
            return self.parameters[key]
        if spec.kind not in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            raise NotUnderstood(f"an input of kind {spec.kind.name.lower()}")
        changed = spec.target in self.program.graph_signature.buffers_to_mutate.values()
        if changed or str(spec.target).endswith(KEPT) or _is_state(spec, tensor):
            args = {"names": self._every_name(spec), "data": tensor, "trained": False}
            return self.buffers.setdefault(str(spec.target), self._value("buffer", args, tensor, Place()))
        return self._constant(str(spec.target), tensor)

    def _every_name(self, spec: Any) -> list[str]:
        """The names under which the module saves a tensor, first that of the graph."""
        own = str(spec.target)
        return [own, *(name for name in self.names.get(own, ()) if name != own)]

    def _constant(self, name: str, tensor: Tensor) -> Value:
        value = self._value("constant", {"name": name}, tensor, Place())
        value.constant = tensor.detach()
        return value

    def _call(self, node: torch.fx.Node, found: Mapping[torch.fx.Node, Any]) -> Any:
        args, kwargs, place = _mapped(node.args, found), _mapped(node.kwargs, found), _place(node)
        target = node.target
        name = str(target)
        if target is operator.getitem:
            if isinstance(args[0], list | tuple):
                return args[0][args[1]]
            args_of = {"x": args[0], "index": args[1]}
            value = self._value("getitem", args_of, node.meta["val"], _of_one(place, args[1]))
            if args[0].results is not None:
                value.constant = args[0].results[args[1]]
            return value
        if not isinstance(target, torch._ops.OpOverload):
            what = "sizes depend on numbers in tensors" if isinstance(target, BuiltinFunctionType) else f"`{name}`"
            raise NotUnderstood(what, place)
        if "assert" in name:
            return None
        schema = target._schema.arguments
        given = {argument.name: value for argument, value in zip(schema, args, strict=False)}
        given.update(kwargs)
        value = self._value(name.removeprefix("aten."), given, node.meta.get("val"), place)
        value.defaults = {each.name: each.default_value for each in schema if each.has_default_value()}
        drawn = torch.Tag.nondeterministic_seeded in target.tags or "dropout" in name
        if is_draw(value.op) and not is_dropping(value.op):
            value.args["number"] = self.draws
            self.draws += 1
        filled = target.overloadpacket in FILLED and all(each is args[0] for each in value.inputs)
        if not drawn and (filled or all(each.constant is not None for each in value.inputs)):
            own = (torch.empty(args[0].shape, dtype=args[0].dtype), *args[1:]) if filled else _elements(args)
            with torch.no_grad():
                result = target(*own, **_elements(kwargs))
                if isinstance(result, Tensor) and result.dtype == torch.float32 and result.numel() == 1:
                    # A number that the module computes, such as a square root, is as exact as the file's.
                    result = target(*map(wider, own), **{key: wider(each) for key, each in _elements(kwargs).items()})
            value.constant = result if isinstance(result, Tensor) else None
            value.results = None if isinstance(result, Tensor) else result
        return value

    def _value(self, op: str, args: dict[str, Any], meta: Any, place: Place) -> Value:
        self.position += 1
        tensor = isinstance(meta, Tensor)
        try:
            shape = tuple(int(size) for size in meta.shape) if tensor else ()
        except Exception as error:  # of symbolic shapes, which are no part of torch's interface
            raise NotUnderstood(f"`{op}`: sizes depend on data", place) from error
        return Value(op, args, shape, meta.dtype if tensor else torch.float32, place, self.position)


def _names_of(module: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter and buffer of a module that has several, by each of them."""
    found: dict[Tensor, list[str]] = {}
    named = (module.named_parameters, module.named_buffers)
    for name, tensor in chain.from_iterable(each(remove_duplicate=False) for each in named):
        found.setdefault(tensor, []).append(name)
    return {name: names for names in found.values() if len(names) > 1 for name in names}


def _is_state(spec: Any, buffer: Tensor) -> bool:
    """Whether a buffer that is saved waits for what it will be: all of its elements are still the same."""
    if not spec.persistent or not buffer.is_floating_point() or not buffer.dim() or not buffer.numel():
        return False
    return bool((buffer == buffer.flatten()[0]).all())


def _names(returned: TreeSpec, name: str = "", depth: int = 0) -> list[tuple[str, int]]:
    """The names of what a module returns, the keys of dictionaries, and how deep each is inside; some have no name."""
    if returned.is_leaf():
        return [(name, depth)]
    children: Sequence[TreeSpec] = returned.children()
    keys = returned.context if isinstance(returned.context, list) else getattr(returned.context, "_fields", None)
    keys = keys[0] if keys and isinstance(keys[0], list) else keys  # of a dataclass, whose others are None
    own = [str(key) for key in keys] if keys is not None else [name] * len(children)
    return [each for key, child in zip(own, children, strict=True) for each in _names(child, key, depth + 1)]


def _mapped(x: Any, known: Mapping[torch.fx.Node, Any]) -> Any:
    if isinstance(x, torch.fx.Node):
        return known[x]
    if isinstance(x, list | tuple):
        return [_mapped(each, known) for each in x]
    if isinstance(x, dict):
        return {name: _mapped(each, known) for name, each in x.items()}
    return x


def _elements(x: Any) -> Any:
    if isinstance(x, Value):
        return x.constant
    if isinstance(x, list | tuple):
        return [_elements(each) for each in x]
    return {name: _elements(each) for name, each in x.items()} if isinstance(x, dict) else x


def wider(x: Any) -> Any:
    """An argument of an operation, a tensor or a dtype, where that computes in f64."""
    if isinstance(x, Tensor):
        return x.to(wider(x.dtype))
    return (
        {torch.float32: torch.float64, torch.complex64: torch.complex128}.get(x, x) if isinstance(x, torch.dtype) else x
    )


def _of_one(place: Place, index: int) -> Place:
    """Where one of several results comes from, which may have a name of its own."""
    at = next((i for i in reversed(range(len(place.lines))) if "/torch/" not in place.lines[i].file), None)
    if at is None or index >= len(place.lines[at].names):
        return place
    return evolve(place, lines=(*place.lines[:at], evolve(place.lines[at], index=index), *place.lines[at + 1 :]))


def _place(node: torch.fx.Node) -> Place:
    calls = []
    for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
        kind = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        calls.append(Call(path, kind, key.partition("@")[2]))
    text = (node.meta.get("stack_trace") or "").strip().split("\n")
    lines = []
    for frame, code in pairwise(text):
        found = FRAME.match(frame)
        if found is not None and found[1] != dropping.__file__:
            names = ASSIGNED.match(code.strip())
            assigned = tuple(name.strip() for name in names[1].split(",")) if names is not None else ()
            lines.append(Line(found[1], int(found[2]), assigned, code.strip(), forward=found[3] == "forward"))
    return Place(tuple(calls), tuple(lines))
