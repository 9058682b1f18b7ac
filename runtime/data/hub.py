"""`hub(repository, split, field, …)`: a dataset of Hugging Face's hub, each row of which is a document; read by the
package datasets while a run uses it, or with `stream = false` before, and kept as ids.

What a run reads is the commit that it begins with, or that of a `revision`: the identity of its data.
"""

from __future__ import annotations

import json
from pathlib import Path

from partita.dsl.config.builtins import HOLDOUT, Flag, Setting, Text
from partita.dsl.spec import Call
from partita.runtime.data.files import END, PACK, TOKENIZER, with_tokenizer
from partita.runtime.data.registry import Source, opened_by, register


def what_is_read(call: Call) -> dict[str, str]:
    """What of the hub a call reads, and its commit. Raises Refused (E0617, E0627)."""
    from partita.runtime.hub import dataset_commit

    names = "repository", "config", "split"
    read = {name: call.arguments[name] or "" for name in names}
    return {**read, "commit": dataset_commit(read["repository"], call.arguments["revision"], call.span)}


def _identity(call: Call, root: Path) -> list[tuple[str, Path]]:
    """A file that says what is read: another one for another commit."""
    from partita.runtime.data import cache

    path = cache.kept(json.dumps(what_is_read(call), indent=1), "hub.json", call.span)
    return [(f"hf://datasets/{call.arguments['repository']}", path)]


register(
    Source(
        "hub",
        (
            Setting("repository", Text()),
            Setting("split", Text(), "train"),
            Setting("field", Text(), "text"),
            Setting("config", Text(), None),
            Setting("revision", Text(), None),
            TOKENIZER,
            END,
            PACK,
            Setting("stream", Flag(), True),
            HOLDOUT,
        ),
        example='hub("allenai/c4", config = "en")',
        open=opened_by("streamed", "open_hub"),
        textual=True,
        files=with_tokenizer(_identity),
    )
)
