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
from partita.dsl.source import Span
from partita.runtime.data import cache
from partita.runtime.data.packages import package

# The schemes of addresses, and the packages that read them beside fsspec.
SCHEMES = {"s3": "s3fs", "gs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
VERSIONS = ("ETag", "etag", "md5Hash", "generation", "LastModified", "mtime")


def fetched(pattern: str, span: Span | None) -> list[tuple[str, Path]]:
    """Copies of the files that match an address, by address and path, sorted; at least one.

    Raises Refused (E0601, E0602, E0603, E0617, E0618).
    """
    scheme = pattern.partition("://")[0]
    if scheme not in SCHEMES:
        known = ", ".join(f"`{each}://`" for each in SCHEMES)
        raise refuse("E0602", f"`{scheme}://` is not among the addresses that data may have", span, help=known)
    package("fsspec", "remote", f"`{scheme}://`", span)
    package(SCHEMES[scheme], "remote", f"`{scheme}://`", span)
    files = package("fsspec.core", "remote", f"`{scheme}://`", span)
    try:
        system, path = files.url_to_fs(pattern)
        system.invalidate_cache()
        found = sorted(system.glob(path) if any(each in path for each in "*?[") else [path])
        infos = [(name, system.info(name)) for name in found]
        infos = [(name, info) for name, info in infos if info.get("type") != "directory"]
    except FileNotFoundError:
        infos = []
    except Exception as error:  # each package raises its own
        raise _unreadable(pattern, error, span) from error
    if not infos:
        raise refuse("E0601", f"nothing is at `{shown(pattern)}`", span)
    return [_copy(system, name, info, scheme, span) for name, info in infos]


def _copy(system: Any, name: str, info: dict[str, Any], scheme: str, span: Span | None) -> tuple[str, Path]:
    address = name if "://" in name else f"{scheme}://{name}"
    size = info.get("size")
    version = [str(info[each]) for each in VERSIONS if info.get(each) is not None] or [system.ukey(name)]
    key = hashlib.sha256("\0".join([address, str(size), *version]).encode()).hexdigest()[:40]

    def fetch(path: str) -> None:
        try:
            system.get_file(name, path)
        except Exception as error:
            raise _unreadable(address, error, span) from error
        there = Path(path).stat().st_size
        if size is not None and there != size:
            raise refuse("E0603", f"`{address}` has {size:,} bytes, of which {there:,} came", span)

    # The end of the name says what some files are.
    return address, cache.file(f"{key}{Path(name.partition('?')[0]).suffix}", fetch, span)


def _unreadable(address: str, error: Exception, span: Span | None) -> Refused:
    reason = shown(str(error).split("\n")[0]) or type(error).__name__
    return refuse("E0603", f"cannot read `{shown(address)}`: {reason}", span)
