"""Servers on this machine that tests read from and write to: of S3, and of files over HTTP."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


class S3:
    """A server of S3 in this process, with one bucket; it can be stopped, and started again with what it had."""

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket
        self._server: Any = None
        self.port = 0
        self.start()
        self.client.create_bucket(Bucket=bucket)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def client(self) -> Any:
        import boto3

        names = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=self.url, **names)

    def start(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from moto.moto_server.threaded_moto_server import ThreadedMotoServer
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()
        _, self.port = self._server.get_host_and_port()

    def stop(self) -> None:
        self._server.stop()

    def names(self) -> list[str]:
        """The names of all objects, in order."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        return sorted(each["Key"] for page in pages for each in page.get("Contents", []))

    def get(self, name: str) -> bytes:
        content: bytes = self.client.get_object(Bucket=self.bucket, Key=name)["Body"].read()
        return content

    def put(self, name: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=name, Body=content)

    def delete(self, name: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=name)

    def empty(self) -> None:
        for name in self.names():
            self.delete(name)

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to find it."""
        return {**os.environ, **CREDENTIALS, "AWS_ENDPOINT_URL": self.url}


@contextmanager
def s3(bucket: str) -> Iterator[S3]:
    """A server of S3, which this process and its children find. Skips where there is none."""
    for module in ("boto3", "s3fs", "flask_cors"):
        pytest.importorskip(module)
    import s3fs

    server = S3(bucket)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": server.url}.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield server
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


class _Files(SimpleHTTPRequestHandler):
    """Files of a directory; also parts of them, as HTTP servers give (RFC 9110, 14.2), unless they give none."""

    ranges = True

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        given = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if given is None or not self.ranges or not path.is_file():
            super().do_GET()
            return
        start, last = int(given[1]), min(int(given[2]), path.stat().st_size - 1)
        content = path.read_bytes()[start : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{last}/{path.stat().st_size}")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class _Refusing(BaseHTTPRequestHandler):
    """Refuses everything."""

    def log_message(self, *_: object) -> None:
        pass

    def refuse(self) -> None:
        content = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = refuse


@contextmanager
def serving(handler: Any) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@contextmanager
def http(directory: Path, ranges: bool = True) -> Iterator[str]:
    """The address of a directory's files; they list their folders."""
    pytest.importorskip("aiohttp")

    class Files(_Files):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(directory))

    Files.ranges = ranges
    with serving(Files) as address:
        yield address


@contextmanager
def refusing() -> Iterator[str]:
    """The address of a server that forbids everything."""
    with serving(_Refusing) as address:
        yield address


@contextmanager
def gs(bucket: str) -> Iterator[None]:
    """A server of Google Cloud Storage, which this process finds. Skips where there is none."""
    pytest.importorskip("gcsfs")
    module = pytest.importorskip("gcp_storage_emulator.server")
    server = module.create_server("127.0.0.1", 0, in_memory=True, default_bucket=bucket)
    server.start()
    port = server._api._httpd.server_address[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        patch.setenv("GOOGLE_CLOUD_PROJECT", "test")
        yield
    server.stop()
