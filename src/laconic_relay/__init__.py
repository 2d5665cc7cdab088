"""The client half of a Flower app that leaves the work to a process that stays.

Flower starts a new process for every message. Importing torch there, each time, costs more than a small client's entire
local update. So the app that Flower starts imports nothing but Flower: it hands the message to a *resident* on the same
machine, over a socket that only this user can open, and gives back the answer. The first message starts the resident;
it ends with the SuperNode, after ten idle minutes, or when an app with other code comes.

This is a package of its own because importing `laconic` is what is to be avoided.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

__all__ = ["answered", "client_app", "receive", "send"]

RECORD = "laconic"
_LENGTHS = struct.Struct("<IQ")
_STARTING = 300.0  # seconds that a resident may take to be there


def client_app(config: Path, *, mods: Sequence[Any] = ()) -> Any:
    """A Flower `ClientApp` for the run that a TOML file describes: as `laconic.flower.client_app`, and quicker.

    Beside what that one reads, `--node-config "resident=false"` does the work here, in Flower's own process.
    """
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp(mods=list(mods))

    def answer(message: Any, context: Any) -> Any:
        record: dict[str, bytes] = dict(context.state[RECORD]) if RECORD in context.state else {}
        values = dict(message.content[RECORD]) if RECORD in message.content else {}
        node = dict(context.node_config)
        if node.pop("resident", True):
            reply, entries = _asked(config.resolve(), node, values, record)
        else:
            reply, entries = answered(config, node, values, record)
        context.state[RECORD] = ConfigRecord(dict(entries))
        return Message(RecordDict({RECORD: ConfigRecord(dict(reply))}), reply_to=message)

    for kind in (app.query, app.train, app.evaluate):
        kind()(answer)
    return app


def answered(
    config: Path, node: Mapping[str, Any], values: Mapping[str, Any], entries: dict[str, bytes]
) -> tuple[Mapping[str, Any], dict[str, bytes]]:
    """The answer to a message, worked out in this very process, and the client's states after it."""
    from laconic.flower.node import answer_values

    return answer_values(config, node, values, entries), entries


# --- the way to the resident -----------------------------------------------------------------------------------------


def send(connection: socket.socket, words: Mapping[str, Any], parts: Sequence[bytes]) -> None:
    """Words and some bytes."""
    head = json.dumps({**words, "parts": [len(part) for part in parts]}).encode()
    connection.sendall(_LENGTHS.pack(len(head), sum(map(len, parts))) + head)
    for part in filter(None, parts):  # who has all that was announced may hang up: nothing empty may follow
        connection.sendall(part)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[bytes]]:
    """What `send` sent."""
    length, size = _LENGTHS.unpack(_exactly(connection, _LENGTHS.size))
    words = json.loads(_exactly(connection, length))
    body, parts, start = _exactly(connection, size), [], 0
    for number in words.pop("parts"):
        parts.append(bytes(body[start : start + number]))
        start += number
    return words, parts


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, have = memoryview(data), 0
    while have < size:
        got = connection.recv_into(view[have:])
        if not got:
            raise ConnectionError("the other end hung up")
        have += got
    return bytes(data)


def _asked(
    config: Path, node: Mapping[str, Any], values: Mapping[str, Any], entries: Mapping[str, bytes]
) -> tuple[Mapping[str, Any], dict[str, bytes]]:
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    blobs = {name: value for name, value in values.items() if isinstance(value, bytes)}
    words = {
        "config": str(config),
        "code": _code(config.parent),
        "node": node,
        "texts": texts,
        "blobs": list(blobs),
        "entries": list(entries),
    }
    said: dict[str, Any] = {"moved": True}
    while "moved" in said:  # that was the resident of an app with other code: the next one is ours
        with closing(_connected()) as connection:
            send(connection, words, [*blobs.values(), *entries.values()])
            said, parts = receive(connection)
    if "error" in said:
        raise RuntimeError(said["error"])
    count = len(said["blobs"])
    reply = {**said["texts"], **dict(zip(said["blobs"], parts[:count], strict=True))}
    return reply, dict(zip(said["entries"], parts[count:], strict=True))


def _code(folder: Path) -> str:
    """A digest of the app's code: settings may change without it."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _connected() -> socket.socket:
    """A connection to this node's resident, which is started where there is none."""
    # The process that started this one lives as long as the SuperNode; so does the resident.
    parent = os.getppid()
    folder = Path(tempfile.gettempdir()) / f"laconic-{os.getuid()}-{parent}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077:
        raise PermissionError(f"{folder} can be opened by others; remove it.")
    path = folder / "resident.sock"
    ends, started = time.monotonic() + _STARTING, None
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
        if started is None:
            path.unlink(missing_ok=True)
            started = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "laconic.flower.resident", str(path), str(parent)], stdin=subprocess.DEVNULL
            )
        elif started.poll() is not None:
            raise RuntimeError(f"the resident ended with code {started.returncode}; see the node's log.")
        if time.monotonic() > ends:
            raise TimeoutError(f"the resident was not there within {_STARTING:g} s.")
        time.sleep(0.05)
