"""The page, live: a small server on this machine alone that reads runs' folders and changes nothing.

It knows two addresses, the page and its data; none of them is made from a path, so there is nothing to climb out of.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Timer
from typing import NamedTuple

from laconic.core import DataError, RunError
from laconic.engine import in_use
from laconic.report.describe import Described, describe, describe_run
from laconic.report.html import as_json, page
from laconic.report.records import RUN_FILES, find_runs, read_run

HOST = "127.0.0.1"
"""Where it listens: never on another interface."""
_log = logging.getLogger(__name__)
_Stamp = tuple[object, ...]


class _Reply(NamedTuple):
    content_type: str
    body: bytes


class Watched:
    """The runs in a folder, read again when their files change. Links are not followed: they may lead elsewhere."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise DataError(f"{folder} is no folder; name the one that holds the runs (laconic run's --out).")
        self.folder = folder
        self._known: dict[Path, tuple[_Stamp, Described]] = {}
        self._lock = Lock()

    def described(self) -> Described:
        """What the page shows now. A run that cannot be read is named with the reason; the others are shown."""
        with self._lock:
            runs, unreadable = [], []
            known, self._known = self._known, {}
            for path in self._folders():
                try:
                    stamp = _stamp(path)
                    found = known.get(path)
                    if found is None or found[0] != stamp:
                        found = (stamp, describe_run(read_run(path)))
                    self._known[path] = found
                    runs.append(found[1])
                except (DataError, OSError) as error:
                    unreadable.append({"name": path.name, "reason": str(error).removeprefix(f"{path}: ")})
            data = describe(runs, unreadable=unreadable)
        # The time of the answer would make every answer a new one.
        return {**data, "made": None}

    def _folders(self) -> list[Path]:
        try:
            return find_runs(self.folder)
        except OSError:  # a folder that went away while we looked
            return []


def _stamp(path: Path) -> _Stamp:
    """What changes when a run's files do."""
    stamp: list[object] = [in_use(path)]
    for name in RUN_FILES:
        file = path / name
        if file.is_symlink():
            raise DataError(f"{path}: {name} is a link, which is not followed here.")
        if file.exists():
            facts = file.stat()
            stamp.append((facts.st_ino, facts.st_size, facts.st_mtime_ns))
        else:
            stamp.append(None)
    return tuple(stamp)


class WatchServer(ThreadingHTTPServer):
    """Serves the page of a folder on 127.0.0.1; `port` 0 is any that is free. Close it when done."""

    daemon_threads = True

    def __init__(self, folder: Path, *, port: int) -> None:
        watched = Watched(folder)

        def data() -> _Reply:
            return _Reply("application/json", as_json(watched.described()).encode())

        whole = _Reply("text/html; charset=utf-8", page(None).encode())
        self.answers: dict[str, Callable[[], _Reply]] = {"/": lambda: whole, "/runs.json": data}
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            said = (getattr(error, "strerror", None) or str(error)).lower()
            raise RunError(f"cannot serve at {HOST}:{port}: {said}; choose another with --port.") from None
        # Pages of other sites can't make a browser ask for us by another name (DNS rebinding).
        self.names = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that hung up is no news; anything else is logged, and the server goes on."""
        _log.debug("a request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    server_version, sys_version = "laconic", ""
    protocol_version = "HTTP/1.1"
    timeout = 30.0

    def handle_one_request(self) -> None:
        """A request that is not there as a whole in time is none: not even one that comes byte by byte."""
        ends = Timer(self.timeout, partial(self._hang_up, self.connection))
        ends.daemon = True
        ends.start()
        try:
            super().handle_one_request()
        finally:
            ends.cancel()

    @staticmethod
    def _hang_up(connection: socket.socket) -> None:
        with suppress(OSError):  # it may be gone already
            connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        if self.headers.get("Host", "").lower() not in self.server.names:
            self._send(
                HTTPStatus.FORBIDDEN, _Reply("text/plain", b"Ask for this page by its own address.\n"), with_body
            )
            return
        answer = self.server.answers.get(self.path.partition("?")[0])
        if answer is None:
            self._send(HTTPStatus.NOT_FOUND, _Reply("text/plain", b"There is nothing here.\n"), with_body)
            return
        reply = answer()
        tag = f'"{sha256(reply.body).hexdigest()[:32]}"'
        same = self.headers.get("If-None-Match") == tag
        self._send(HTTPStatus.NOT_MODIFIED if same else HTTPStatus.OK, reply, with_body and not same, tag=tag)

    def _send(self, status: HTTPStatus, reply: _Reply, with_body: bool, *, tag: str | None = None) -> None:
        self.send_response(status)
        if tag is not None:
            self.send_header("ETag", tag)
        if status is not HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Type", reply.content_type)
            self.send_header("Content-Length", str(len(reply.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        if with_body:
            self.wfile.write(reply.body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: what a browser asks for every two seconds is no news."""
