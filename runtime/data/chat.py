"""`chat(glob, tokenizer, …)`: conversations, one a line, of which what the assistant says is learned.

A line is `{"messages": [{"role": "user", "content": "…"}, …]}`, with `tools` and `chat_template_kwargs` (what else the
template reads) if there are any; or as ShareGPT has them, `{"conversations": [{"from": "human", "value": "…"}, …]}`; or
as Alpaca does, `{"instruction": "…", "input": "…", "output": "…"}`.
"""

from __future__ import annotations

from pathlib import Path

from partita.dsl.config.builtins import HOLDOUT, Flag, Setting, Text
from partita.dsl.diagnostic import Diagnostic
from partita.dsl.spec import Call
from partita.runtime.data.files import matched, tokenizer_file, with_tokenizer
from partita.runtime.data.registry import Source, opened_by, register

# Beside tokenizer.json: what has the template, and the names of special tokens.
BESIDE = ("chat_template.jinja", "tokenizer_config.json")


def with_template(call: Call, root: Path) -> list[tuple[str, Path]]:
    """The files of conversations, their tokenizer if there is one, and what is beside it."""
    own, tokenizer = with_tokenizer(matched("glob"))(call, root), call.arguments["tokenizer"]
    if tokenizer is None:
        return own
    folder = tokenizer_file(tokenizer, root, call.span).parent
    return [*own, *((f"{tokenizer} {name}", folder / name) for name in BESIDE if (folder / name).is_file())]


def _warnings(call: Call, root: Path) -> list[Diagnostic]:
    """W0609: what of conversations is not learned."""
    from partita.runtime.data.conversations import turns_left_out

    return turns_left_out(call, root)


register(
    Source(
        "chat",
        (
            *(Setting("glob", Text()), Setting("tokenizer", Text()), Setting("pack", Flag(), False)),
            *(Setting("cut", Flag(), False), HOLDOUT),
        ),
        example='chat("chats.jsonl", tokenizer = "qwen3")',
        open=opened_by("conversations", "open_chats"),
        textual=True,
        endings=(".jsonl",),
        files=with_template,
        warnings=_warnings,
    )
)
