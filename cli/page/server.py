"""Serves a run's page on the loopback interface, to who has its token.

Who can reach the port may still not be who ran the command: another user of the machine, or a web page that the user
has open, also by a name of its own that it lets point to 127.0.0.1 (DNS rebinding). So a request is refused unless it
has the token, names this host and port, and comes from this page or from no page at all. No request changes anything.
"""

from __future__ import annotations

import secrets
from email.message import Message
from hmac import compare_digest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from urllib.parse import parse_qs, urlsplit

from partita.cli.page.document import document, policy
from partita.cli.page.run import Run
from partita.cli.page.sections import content

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")
IDLE_SECONDS = 30.0  # of a connection
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": f"{policy(live=True)}; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Server(ThreadingHTTPServer):
    """Serves one run. A context manager. Raises OSError if the port is taken."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, run: Run, port: int = 0) -> None:
        super().__init__((HOST, port), Handler)
        self.watched = run
        self.token = secrets.token_urlsafe(24)
        self._reading = Lock()

    @property
    def address(self) -> str:
        """Where a browser finds the page."""
        return f"http://{HOST}:{self.server_port}/?token={self.token}"

    def refusal(self, path: str, headers: Message) -> str | None:
        """Why a request is refused; None if it is not."""
        hosts = [f"{name}:{self.server_port}" for name in NAMES]
        host_headers = headers.get_all("Host", [])
        if len(host_headers) != 1 or host_headers[0] not in hosts:
            return "this server has another name"
        origins, sites = headers.get_all("Origin", []), headers.get_all("Sec-Fetch-Site", [])
        if set(origins) - {f"http://{host_headers[0]}"} or set(sites) - {"none", "same-origin"}:
            return "the request comes from another page"
        tokens = parse_qs(urlsplit(path).query).get("token", [])
        if len(tokens) != 1 or not compare_digest(tokens[0].encode(), self.token.encode()):
            return "the address needs the token that `partita watch` has printed"
        return None

    def page(self) -> str:
        """The whole page."""
        with self._reading:
            self.watched.refresh()
            return document(self.watched, live=True)

    def newer(self, version: str) -> tuple[int, str | None]:
        """The version of the content, and the content if it is another version than this."""
        with self._reading:
            now = self.watched.refresh()
            return now, content(self.watched) if version != str(now) else None

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that breaks is nobody's concern."""


class Handler(BaseHTTPRequestHandler):
    """One request: `/` is the page, `/content` what of it is newer than `version`."""

    server: Server
    server_version, sys_version = "Partita", ""
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        """Answer, or refuse."""
        try:
            parts = urlsplit(self.path)
            refusal = self.server.refusal(self.path, self.headers)
        except ValueError:
            refusal = "this is no address"
        if refusal is not None:
            return self._answer(403, f"{refusal}\n", "text/plain")
        try:
            if parts.path == "/":
                return self._answer(200, self.server.page())
            if parts.path == "/content":
                version, newer = self.server.newer(parse_qs(parts.query).get("version", [""])[0])
                return self._answer(204 if newer is None else 200, newer or "", version=version)
        except OSError as error:
            return self._answer(503, f"the run cannot be read: {error.strerror}\n", "text/plain")
        return self._answer(404, "there is no such page\n", "text/plain")

    do_HEAD = do_GET

    def _answer(self, status: int, text: str, kind: str = "text/html", version: int | None = None) -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        if version is not None:
            self.send_header("X-Version", str(version))
        if status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: their addresses have the token."""
