"""What of a model writes: an output with logits of the next id, along the sequence of an input of ids."""

from __future__ import annotations

from typing import NoReturn

from attrs import frozen

from partita.dsl.advice.report import Report, nearest
from partita.dsl.check.arguments import parameters_of_call
from partita.dsl.check.reach import inputs_of_output
from partita.dsl.config.builtins import DATA
from partita.dsl.diagnostic import Refused, refuse
from partita.dsl.functions.signatures import FUNCTIONS, LIKELIHOODS
from partita.dsl.spec import Apply, Call, Model
from partita.dsl.syntax import tree
from partita.dsl.syntax.parser import parse_expression
from partita.dsl.syntax.source import Span
from partita.dsl.syntax.unparse import expression_text
from partita.dsl.syntax.walk import nodes
from partita.dsl.types import INTEGERS, Axis, Type

USUAL = "logits"
# The source of prompts which the model answers as it trains.
ROLLOUTS = "rollouts"
# The argument by which a mixture names its sources.
SOURCES_OF = "sources"
# Inputs that describe one document which begins at the first position.
DESCRIBING = ("segments", "positions")


@frozen
class LanguageModel:
    """`output`, of type `logits`, has numbers for `vocab` at each position of `sequence`, from the ids in the input
    `tokens`. `others` are inputs that only say where a document begins.
    """

    output: str
    logits: Type
    tokens: str
    sequence: Axis
    vocab: Axis
    others: tuple[str, ...] = ()

    @property
    def window(self) -> int:
        """The most ids that it sees."""
        return self.sequence.size

    @property
    def names(self) -> tuple[str, ...]:
        """The inputs."""
        return (self.tokens, *self.others)


def sources_of(data: Call) -> list[Call]:
    """The sources of a mixture, or the one that the data are."""
    if SOURCES_OF not in data.arguments:
        return [data]
    return [source for each in data.arguments[SOURCES_OF] for source in sources_of(each.call)]


def how_spelled(data: Call) -> str | None:
    """How a source makes ids of text, in words; None if its ids come from elsewhere."""
    if data.arguments.get("tokenizer") is not None:
        return f"by `{data.arguments['tokenizer']}`"
    if not DATA[data.name].textual:
        return None
    return "by characters" if data.arguments.get("alphabet") == "chars" else "by bytes"


def spelling_of(data: Call, place: Span | None = None, help: str | None = None) -> Call:
    """The source that says how text becomes ids: the data or, of a mixture, the first of them. Raises Refused (E1003),
    with this help, at a place or at the data, if they have ids of something else.
    """
    data = sources_of(data)[0]  # a mixture is of one encoding
    if how_spelled(data) is None:
        message = f"`{data.name}` has ids, and does not say how text becomes ids"
        raise refuse("E1003", message, place or data.span, help=help)
    return data


def no_output(model: Model, name: str, span: Span | None = None) -> Refused:
    """The error (E0302) that a model has no output of a name, at a place or at the model."""
    known = [each for each, _ in model.outputs]
    message = f"model `{model.name}` has no output `{name}`" if known else f"model `{model.name}` has no output"
    near = nearest(name, known)
    help = f"did you mean `{near}`?" if near else f"it has: {', '.join(known)}"
    help = help if known else _declared_as(model)
    return refuse("E0302", message, span or model.span, help=help)


def _declared_as(model: Model) -> str:
    """Help that declares an output: what the model's own loss of targets reads."""
    for step in model.answering.steps:
        if isinstance(step, Apply) and step.function in LIKELIHOODS:
            call = parse_expression(step.span.source, Report(), step.span.start, step.span.end)
            call = tree.bare(call) if call is not None else None
            if not isinstance(call, tree.Call):
                continue
            names = parameters_of_call(call, [slot.name for slot in FUNCTIONS[step.function].slots])
            read = call.arguments[names.index("logits")].value
            text = expression_text(read)
            if all(each.name.text in FUNCTIONS for each in nodes(read) if isinstance(each, tree.Call)):
                return f"in the model, `output {USUAL} = {text}`"
            # Another call of a block would have parameters of its own.
            return f"`let {USUAL} = {text}` for the loss to read, and `output {USUAL} = {USUAL}`"
    if any(isinstance(step, Apply) and step.name == USUAL for step in model.answering.steps):
        return f"in the model, `output {USUAL} = {USUAL}`"
    return f"declare one in the model: `output {USUAL} = …`"


def language_model(model: Model, batch: str, output: str = USUAL, span: Span | None = None) -> LanguageModel:
    """The language model whose logits are an `output`; `batch` is the axis of rows.

    Raises Refused at a place, or at the model: E0302 if it has no such output, E1001 if that is not of a model that
    writes.
    """
    if output not in dict(model.outputs):
        raise no_output(model, output, span)
    inputs = inputs_of_output(model, output)
    types: dict[str, Type] = dict(zip(model.body.inputs, model.body.types, strict=False))
    logits = model.answering.types[dict(model.outputs)[output]]

    def refused(why: str, help: str) -> NoReturn:
        notes = [f"output {output}: {logits}", *(f"input {name}: {types[name]}" for name in inputs)]
        message = f"`{model.name}` is not a model that writes: {why}"
        raise refuse("E1001", message, span or model.span, notes=notes, help=help)

    shape = "it has an input such as `tokens: i64[batch, seq]`"
    ids = [name for name in inputs if name not in DESCRIBING]
    if len(ids) != 1 or types[ids[0]].dtype not in INTEGERS:
        what = ", ".join(f"`{name}`" for name in ids) or "no input"
        refused(f"`{output}` needs {what}, and not ids alone", shape)
    type = types[ids[0]]
    sequence = [axis for axis in type.axes if axis.name != batch]
    if len(sequence) != 1:
        refused(f"`{ids[0]}` has not one axis besides `{batch}`", shape)
    vocab = [axis for axis in logits.axes if not type.has(axis.name)]
    if not logits.is_float or len(vocab) != 1 or not all(logits.has(axis.name) for axis in type.axes):
        expected = ", ".join([*type.names, "vocab"])
        refused(f"`{output}` does not have logits at each position", f"`output {output}` over [{expected}]")
    others = tuple(name for name in inputs if name != ids[0])
    for name in others:
        if types[name].dtype not in INTEGERS or set(types[name].names) != set(type.names):
            refused(f"`{name}` is not integers along `{ids[0]}`", shape)
    return LanguageModel(output, logits, ids[0], sequence[0], vocab[0], others)
