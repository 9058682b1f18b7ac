"""What a call takes, and which argument is being written."""

from __future__ import annotations

from collections.abc import Sequence

from lsprotocol import types as lsp

from partita.dsl.advice.report import Full, Report
from partita.dsl.check.arguments import REQUIRED
from partita.dsl.functions.signatures import FUNCTIONS
from partita.dsl.syntax import tree
from partita.dsl.syntax.lexer import Token, tokenize
from partita.dsl.syntax.source import Source


def signature(declarations: Sequence[tree.Declaration], source: Source, offset: int) -> lsp.SignatureHelp | None:
    """The innermost call around a character of a source; None if there is none of a known function."""
    try:
        tokens = [each for each in tokenize(source, Report()) if each.end <= offset]
    except Full:
        return None
    open: list[tuple[Token | None, int]] = []  # what stands before a bracket, and where the last argument in it begins
    counts: list[int] = []
    for i, token in enumerate(tokens):
        if token.text in ("(", "[", "{"):
            before = tokens[i - 1] if i and token.text == "(" else None
            open.append((before, i + 1))
            counts.append(0)
        elif token.text in (")", "]", "}") and open:
            open.pop()
            counts.pop()
        elif token.text == "," and open:
            open[-1] = open[-1][0], i + 1
            counts[-1] += 1
    name, first = open[-1] if open else (None, 0)
    parameters = _parameters(name.text, declarations) if name is not None else None
    if name is None or parameters is None:
        return None
    names = [each.partition(":")[0].partition(" ")[0] for each in parameters]
    active, written = counts[-1], tokens[first : first + 2]
    if len(written) == 2 and written[1].text == "=" and written[0].text in names:
        active = names.index(written[0].text)
    label, information = f"{name.text}({', '.join(parameters)})", list(map(lsp.ParameterInformation, parameters))
    call = lsp.SignatureInformation(label, parameters=information, active_parameter=active)
    return lsp.SignatureHelp([call], active_signature=0, active_parameter=active)


def _parameters(name: str, declarations: Sequence[tree.Declaration]) -> tuple[str, ...] | None:
    for each in declarations:
        if isinstance(each, tree.Block | tree.Operation) and each.name.text == name:
            return tuple(parameter.span.text for parameter in each.inputs)
    if name not in FUNCTIONS:
        return None
    slots = FUNCTIONS[name].slots
    return tuple(each.name if each.default is REQUIRED else f"{each.name} =" for each in slots)
