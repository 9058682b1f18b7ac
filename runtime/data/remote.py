"""Files at addresses such as `s3://bucket/corpus/*.jsonl`: copied once, and read where the copy is.

fsspec reads them, with the credentials that its packages find (environment, configuration files, the machine's role). A
copy is kept in the cache (`partita.runtime.data.cache`) by address, size and version: an object that changes is copied
anew.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from partita.dsl.diagnostic import Refused, refuse, shown
from partita.dsl.syntax.source import Span
from partita.runtime.addresses import reason, storage_errors_translated, system_of
from partita.runtime.data import cache

VERSIONS = ("ETag", "etag", "md5Hash", "generation", "LastModified", "mtime")


def fetched(pattern: str, span: Span | None) -> list[tuple[str, Path]]:
    """Copies of the files that match an address, by address and path, sorted; at least one.

    Raises Refused (E0601, E0602, E0603, E0617, E0618).
    """
    try:
        system, path = system_of(pattern, span)
        with storage_errors_translated():
            names = sorted(system.glob(path) if any(each in path for each in "*?[") else [path])
            infos = [(name, system.info(name)) for name in names]
        infos = [(name, info) for name, info in infos if info.get("type") != "directory"]
    except FileNotFoundError:
        infos = []
    except OSError as error:
        raise _unreadable(pattern, error, span) from error
    if not infos:
        raise refuse("E0601", f"nothing is at `{shown(pattern)}`", span)
    return [_copy(system, name, info, pattern.partition("://")[0], span) for name, info in infos]


def _copy(system: Any, name: str, info: dict[str, Any], scheme: str, span: Span | None) -> tuple[str, Path]:
    address = name if "://" in name else f"{scheme}://{name}"
    size = info.get("size")
    version = [str(info[each]) for each in VERSIONS if info.get(each) is not None] or [system.ukey(name)]
    key = hashlib.sha256("\0".join([address, str(size), *version]).encode()).hexdigest()[:40]

    def fetch(path: str) -> None:
        try:
            with storage_errors_translated():
                system.get_file(name, path)
        except OSError as error:
            raise _unreadable(address, error, span) from error
        received = Path(path).stat().st_size
        if size is not None and received != size:
            raise refuse("E0603", f"`{address}` has {size:,} bytes, of which {received:,} came", span)

    # The end of the name says what some files are.
    return address, cache.file(f"{key}{Path(name.partition('?')[0]).suffix}", fetch, span)


def _unreadable(address: str, error: OSError, span: Span | None) -> Refused:
    return refuse("E0603", f"cannot read `{shown(address)}`: {error.strerror or reason(error)}", span)
