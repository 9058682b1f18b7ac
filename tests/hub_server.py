"""A server on this machine that speaks the HTTP API of Hugging Face's hub, as far as huggingface_hub and datasets use
it: what a repository has, and its files, whole or in part.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.servers import serving

API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.+))?)?")
FILE = re.compile(r"(?:/(datasets))?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Hub:
    """Repositories by kind (`models`, `datasets`) and id, each the content of its files; and what was asked for."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], dict[str, bytes]] = {}
        self.requests: list[str] = []
        self.refused: dict[str, tuple[int, str]] = {}  # with a status, and a code of the hub's
        self.url = ""

    def put(self, kind: str, id: str, files: dict[str, bytes]) -> None:
        self.repositories[kind, id] = files

    def commit(self, kind: str, id: str) -> str:
        """The commit that `main` is: another one for other content."""
        files = self.repositories[kind, id]
        digest = hashlib.sha1()
        for name in sorted(files):
            digest.update(f"{name}\0{blob(files[name])}\n".encode())
        return digest.hexdigest()


def blob(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Answers for the `hub` of a subclass."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        path = unquote(urlsplit(self.path).path)
        if (found := API.fullmatch(path)) is not None:
            kind, id, what, revision, inner = found.groups()
            self._about(kind, id, what, revision, inner or "")
        elif (found := FILE.fullmatch(path)) is not None:
            kind, id, revision, name = found.groups()
            self._file(kind or "models", id, revision, name)
        else:
            self._refuse("EntryNotFound")

    do_HEAD = do_POST = do_GET

    def _known(self, kind: str, id: str, revision: str | None) -> bool:
        if id in self.hub.refused:
            self._refuse(self.hub.refused[id][1], self.hub.refused[id][0])
            return False
        if (kind, id) not in self.hub.repositories:
            self._refuse("RepoNotFound")
            return False
        if revision not in (None, "main", self.hub.commit(kind, id)):
            self._refuse("RevisionNotFound")
            return False
        return True

    def _about(self, kind: str, id: str, what: str | None, revision: str | None, inner: str) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length).decode()
        if not self._known(kind, id, revision):
            return
        files = self.hub.repositories[kind, id]
        if what in (None, "revision"):
            siblings = [{"rfilename": name} for name in files]
            about = {"id": id, "sha": self.hub.commit(kind, id), "siblings": siblings, "private": False, "tags": []}
            self._json({**about, "lastModified": "2026-01-01T00:00:00.000Z"})
            return
        if what == "tree":
            self._json(list(_entries(files, inner, "recursive=true" in self.path.lower())))
            return
        try:
            asked = json.loads(body)["paths"]
        except ValueError:
            asked = parse_qs(body)["paths"]
        below = {name: entry for name in files for entry in _entries(files, name.rpartition("/")[0], False)}
        found = {
            entry["path"]: entry for name in ["", *below] for entry in _entries(files, name.rpartition("/")[0], False)
        }
        self._json([found[name] for name in asked if name in found])

    def _file(self, kind: str, id: str, revision: str, name: str) -> None:
        if not self._known(kind, id, revision):
            return
        content = self.hub.repositories[kind, id].get(name)
        if content is None:
            self._refuse("EntryNotFound", commit=self.hub.commit(kind, id))
            return
        size, given = len(content), re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, last = (int(given[1]), min(int(given[2] or size), size - 1)) if given else (0, size - 1)
        self.send_response(206 if given else 200)
        if given:
            self.send_header("Content-Range", f"bytes {start}-{last}/{size}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{blob(content)}"')
        self.send_header("X-Repo-Commit", self.hub.commit(kind, id))
        self.send_header("Content-Length", str(last + 1 - start))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[start : last + 1])

    def _json(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _refuse(self, code: str, status: int = 404, commit: str | None = None) -> None:
        self.send_response(status)
        if commit is not None:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _entries(files: dict[str, bytes], folder: str, recursive: bool) -> Iterator[dict[str, Any]]:
    """What is in a folder, files and folders."""
    start = f"{folder}/" if folder else ""
    folders = set()
    for name, content in files.items():
        if not name.startswith(start):
            continue
        inner = name[len(start) :]
        parents = [inner[:i] for i, each in enumerate(inner) if each == "/"]
        for parent in parents if recursive else parents[:1]:
            if parent not in folders:
                folders.add(parent)
                yield {"type": "directory", "path": start + parent, "size": 0, "oid": blob(parent.encode())}
        if recursive or not parents:
            yield {"type": "file", "path": name, "size": len(content), "oid": blob(content)}


@contextmanager
def hub(home: Path) -> Iterator[Hub]:
    """A hub that this process and its children find, whose cache is in a folder. Skips where nothing reads one."""
    constants = pytest.importorskip("huggingface_hub.constants")
    server = Hub()

    class Answers(Handler):
        hub = server

    with serving(Answers) as server.url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", server.url)
        patch.setenv("HF_HOME", str(home))
        # What was read when the libraries were imported.
        patch.setattr(constants, "ENDPOINT", server.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        if (library := sys.modules.get("datasets")) is not None:
            patch.setattr(library.config, "HF_ENDPOINT", server.url)
            patch.setattr(
                library.config, "HUB_DATASETS_URL", server.url + "/datasets/{repo_id}/resolve/{revision}/{path}"
            )
        yield server
