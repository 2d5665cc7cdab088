"""A node's process that stays: it answers what Flower's short-lived processes hand to it (see `laconic_relay`)."""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from laconic.flower.node import answer_values
from laconic_relay import receive, send

_IDLE = 600.0  # seconds without a message after which it ends
_LOOK = 1.0  # seconds between looks whether the SuperNode is still there


def stay(path: Path, parent: int) -> None:
    """Answer calls until the SuperNode's process is gone, or nobody has called for a while."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        last, code = time.monotonic(), ""
        while _alive(parent) and time.monotonic() - last < _IDLE:
            if select.select([listener], [], [], _LOOK)[0]:
                connection, _ = listener.accept()
                with connection:
                    code = _serve(connection, code, path)
                last = time.monotonic()
        path.unlink(missing_ok=True)
    if not _alive(parent):  # nobody will look for a resident there again
        with suppress(OSError):
            path.parent.rmdir()


def _serve(connection: socket.socket, code: str, path: Path) -> str:
    """Answer a call; gives the code of the app that this process has imported."""
    try:
        words, parts = receive(connection)
        if code and words["code"] != code:
            path.unlink(missing_ok=True)  # before the word: the next call finds nobody, and starts another
            send(connection, {"moved": True}, [])
            sys.exit()
        code = words["code"]
        count = len(words["blobs"])
        values = {**words["texts"], **dict(zip(words["blobs"], parts[:count], strict=True))}
        entries = dict(zip(words["entries"], parts[count:], strict=True))
        config = Path(words["config"])
        if str(config.parent) not in sys.path:  # a user's own modules lie beside it
            sys.path.insert(0, str(config.parent))
        try:
            reply = answer_values(config, words["node"], values, entries)
        except Exception as error:  # the caller raises it, and Flower reports it
            send(connection, {"error": f"{type(error).__name__}: {error}"}, [])
            return code
        texts = {name: value for name, value in reply.items() if isinstance(value, str)}
        blobs = {name: value for name, value in reply.items() if isinstance(value, bytes)}
        said = {"texts": texts, "blobs": list(blobs), "entries": list(entries)}
        send(connection, said, [*blobs.values(), *entries.values()])
    except (ConnectionError, BrokenPipeError):
        pass  # the caller was ended while it waited
    return code


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    stay(Path(sys.argv[1]), int(sys.argv[2]))
