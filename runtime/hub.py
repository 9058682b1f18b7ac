"""What is on Hugging Face's hub under an id, `org/name`: files of models, which are downloaded once and found in the
hub's cache from then on; and datasets.

What is in the cache is used as it is, without a network. Whoever asks the hub asks first for what it has, once and for
a few seconds: huggingface_hub tries a download for minutes before it says that there is no network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from partita.dsl.diagnostic import Refused, refuse, shown
from partita.dsl.syntax.source import Span
from partita.runtime.data.packages import package

NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# What stands around an id.
ADDRESS = re.compile(r"(hf://|https?://(www\.)?(huggingface\.co|hf\.co)/)|(?<=\w)/(tree|blob|resolve)/.*")
COMMIT = re.compile("[0-9a-f]{40}")
MAX_LINES = 4  # of a message
TIMEOUT = 10  # seconds, of what is asked first
# What says how text becomes ids, and what a model is; and tensors, beside all that is small.
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MODEL = ("config.json", *TOKENIZER)
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja")


def is_id(text: str) -> bool:
    """Whether a text can be the id of a repository. Files may have such names as well, and come first."""
    return NAME.fullmatch(text) is not None and not text.endswith((".json", ".par", ".safetensors"))


def model_folder(id: str, names: Sequence[str], span: Span | None = None) -> Path:
    """The folder that has these files of a model, as far as there are any; the first must be there. Raises Refused
    (E0617, E0627).
    """
    library = package("huggingface_hub", "data", f"`{id}`", span)
    known = [library.try_to_load_from_cache(id, name) for name in names]  # None of what was never asked for
    if not all(known):
        with _unless(isinstance(known[0], str)), reached(id, span):
            library.HfApi().model_info(id, timeout=TIMEOUT)
            for name in names:
                _download(library, id, name)
    first = library.try_to_load_from_cache(id, names[0])
    if not isinstance(first, str):
        raise refuse("E0627", f"`{id}` on the hub has no {names[0]}", span)
    return Path(first).parent


def weights_folder(id: str, span: Span | None = None) -> Path:
    """The folder that has the tensors of a model, and what is small beside them. Raises Refused (E0617, E0627)."""
    library = package("huggingface_hub", "data", f"`{id}`", span)
    known = [library.try_to_load_from_cache(id, f"model.safetensors{end}") for end in ("", ".index.json")]
    cached = next((Path(each).parent for each in known if isinstance(each, str)), None)
    try:
        with reached(id, span):
            library.HfApi().model_info(id, timeout=TIMEOUT)
            return Path(library.snapshot_download(id, allow_patterns=WEIGHTS))
    except Refused:
        if cached is None:
            raise
        return cached


def dataset_commit(id: str, revision: str | None, span: Span | None) -> str:
    """The commit that a dataset is at, or that a revision is. Raises Refused (E0617, E0627)."""
    if revision is not None and COMMIT.fullmatch(revision):
        return revision
    library = package("huggingface_hub", "hub", f"`{id}`", span)
    with reached(id, span):
        return str(library.HfApi().dataset_info(id, revision=revision, timeout=TIMEOUT).sha)


def opened_dataset(id: str, config: str | None, split: str, commit: str, span: Span | None) -> Any:
    """The rows of a split, of the package datasets, which reads them one by one. Raises Refused (E0617, E0627)."""
    library = package("datasets", "hub", "`hub`", span)
    try:
        with reached(id, span, ValueError):
            package("huggingface_hub", "hub", "`hub`", span).HfApi().dataset_info(id, revision=commit, timeout=TIMEOUT)
            return library.load_dataset(id, config, split=split, revision=commit, streaming=True)
    except Refused:
        raise
    except ValueError as error:  # of a split or a configuration that is not there
        lines = [shown(line.strip()) for line in str(error).splitlines() if line.strip()]
        raise refuse("E0627", f"`{shown(id)}` on the hub: {lines[0]}", span, notes=lines[1:MAX_LINES]) from error


def _download(library: Any, id: str, name: str) -> None:
    try:
        library.hf_hub_download(id, name)
    except library.errors.LocalEntryNotFoundError:
        raise
    except library.errors.EntryNotFoundError:
        pass  # the cache knows that it is not there


@contextmanager
def _unless(otherwise: bool) -> Iterator[None]:
    """What the hub refuses is refused, unless there is what to use otherwise."""
    try:
        yield
    except Refused:
        if not otherwise:
            raise


@contextmanager
def reached(id: str, span: Span | None, *others: type[Exception]) -> Iterator[None]:
    """Refuse (E0627) what the hub does not have, or has not for us, or does not answer; `others` are raised."""
    errors = package("huggingface_hub.errors", "data", f"`{id}`", span)
    try:
        yield
    except Refused:
        raise
    except errors.GatedRepoError as error:
        help = "accept its terms on its page of the hub, then `hf auth login`"
        raise refuse("E0627", f"`{shown(id)}` is not for everyone", span, help=help) from error
    except errors.RepositoryNotFoundError as error:
        help = "`hf auth login`, if it is private"
        raise refuse(
            "E0627", f"nothing here is called `{shown(id)}`, and nothing on the hub", span, help=help
        ) from error
    except errors.RevisionNotFoundError as error:
        raise refuse("E0627", f"`{shown(id)}` on the hub has no such revision", span) from error
    except errors.OfflineModeIsEnabled as error:
        message = f"`{shown(id)}` is not on this machine, and HF_HUB_OFFLINE forbids to ask the hub"
        raise refuse("E0627", message, span) from error
    except others:
        raise
    except Exception as error:  # of its own, of the library for HTTP, and of the system
        reason = shown(next(iter(str(error).strip().splitlines()), "") or type(error).__name__)
        raise refuse("E0627", f"`{shown(id)}` is not here, and cannot be read from the hub: {reason}", span) from error
