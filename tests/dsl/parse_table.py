"""Grammar → parse table: `python -m tests.dsl.parse_table` writes grammars/par.json from grammars/par.lark.

Lark builds the LALR(1) table. This module writes it with a canonical numbering, so that the file changes only when the
grammar does; `partita.grammars` describes its format.
"""

from __future__ import annotations

import json
from typing import Any

from lark import Lark
from lark.grammar import Rule
from lark.lexer import TerminalDef

from tests.files import ROOT

STARTS = ("file", "expression")
GRAMMAR, TABLE = ROOT / "grammars" / "par.lark", ROOT / "grammars" / "par.json"


def build(grammar: str) -> dict[str, Any]:
    """The parse table of a grammar. Lark raises on conflicts and on overlapping terminals."""
    lark = Lark(grammar, parser="lalr", lexer="basic", strict=True, start=list(STARTS))
    data, memo = lark.memo_serialize([TerminalDef, Rule])
    table = data["parser"]["parser"]
    terminals = [memo[item["@"]] for item in data["parser"]["lexer_conf"]["terminals"]]
    strings = [t for t in terminals if t["pattern"]["__type__"] == "PatternStr"]
    rules = [memo[item["@"]] for item in data["parser"]["parser_conf"]["rules"]]
    numbers = {json.dumps(rule, sort_keys=True, default=str): i for i, rule in enumerate(rules)}

    def entry(action: int, argument: Any) -> tuple[str, int]:
        if action == 0:
            return "go", argument
        return "reduce", numbers[json.dumps(memo[argument["@"]], sort_keys=True, default=str)]

    states = {
        state: {table["tokens"][symbol]: entry(*value) for symbol, value in row.items()}
        for state, row in table["states"].items()
    }
    order = _breadth_first(states, [table["start_states"][start] for start in STARTS])
    return {
        "words": {t["pattern"]["value"]: t["name"] for t in sorted(strings, key=lambda t: str(t["name"]))},
        "patterns": [[t["name"], t["pattern"]["value"]] for t in terminals if t not in strings],
        "ignored": data["parser"]["lexer_conf"]["ignore"],
        "rules": [_rule(rule) for rule in rules],
        "origins": [rule["origin"]["name"] for rule in rules],
        "states": [
            {
                symbol: order[number] if kind == "go" else -1 - number
                for symbol, (kind, number) in sorted(states[state].items())
            }
            for state in order
        ],
        "starts": {start: [order[table["start_states"][start]], order[table["end_states"][start]]] for start in STARTS},
    }


def _rule(rule: dict[str, Any]) -> list[Any]:
    name = rule["origin"]["name"]
    kept = [i for i, symbol in enumerate(rule["expansion"]) if not symbol.get("filter_out", False)]
    builder = rule["alias"] or ("" if name.startswith("_") else "?" if rule["options"]["expand1"] else name)
    return [builder, len(rule["expansion"]), kept]


def _breadth_first(states: dict[int, dict[str, tuple[str, int]]], starts: list[int]) -> dict[int, int]:
    """Number the states in breadth-first order from the starts, symbols alphabetically."""
    order: dict[int, int] = {}
    queue = list(starts)
    for state in queue:
        if state in order:
            continue
        order[state] = len(order)
        queue.extend(number for _, (kind, number) in sorted(states[state].items()) if kind == "go")
    return order


def text(table: dict[str, Any]) -> str:
    """The table as JSON, with one state or rule per line for readable diffs."""
    lines = []
    for key, value in table.items():
        if key in ("states", "rules"):
            rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in value)
            lines.append(f'"{key}": [\n{rows}\n]')
        else:
            lines.append(f'"{key}": {json.dumps(value, separators=(",", ":"))}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    TABLE.write_text(text(build(GRAMMAR.read_text(encoding="utf-8"))), encoding="utf-8")
