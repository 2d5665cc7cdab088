"""Files that are either whole or absent."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import IO

from laconic.core import RunError

TEMPORARY = ".tmp-"


def write_atomically(path: Path, data: bytes, *, mode: int | None = None) -> None:
    """Write under a temporary name, sync, rename, sync the folder: no reader ever sees half a file."""
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    try:
        with temporary.open("wb") as file:
            if mode is not None:  # while there is nothing in it
                os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_path(path.parent)
    except OSError as error:
        with suppress(OSError):  # what keeps us from writing may keep us from deleting
            temporary.unlink(missing_ok=True)
        raise cannot_write(path, error) from None


class Behind:
    """Something that a thread does while the run goes on, one thing at a time; `wait` tells what went wrong."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def start(self, *steps: Callable[[], None]) -> None:
        """Begin with some steps, once what was begun before is done."""
        self.wait()
        self._thread = Thread(target=self._run, args=steps)
        self._thread.start()

    def wait(self) -> bool:
        """Until it is done; says whether there was something, and raises the error that kept it from being done."""
        self.close()
        began, error = self._thread is not None, self._error
        self._thread = self._error = None
        if error is not None:
            raise error
        return began

    def close(self) -> None:
        """Until it is done or has failed."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, *steps: Callable[[], None]) -> None:
        try:
            for step in steps:
                step()
        except BaseException as error:  # whatever it is, it is the run's
            self._error = error


def remove_temporaries(folder: Path) -> None:
    """Remove what a process left that was killed while it wrote. Only for who holds the folder's lock."""
    for path in folder.glob(f"{TEMPORARY}*"):
        path.unlink(missing_ok=True)


def sync_path(path: Path) -> None:
    """Make a file's bytes durable, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_all(file: IO[bytes], data: bytes) -> None:
    """Write to an unbuffered file: what fails, fails here, and nothing is left to be written when it is closed."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def cannot_write(path: Path, error: OSError) -> RunError:
    """One sentence for whatever the disk said."""
    said = (error.strerror or str(error)).lower()
    return RunError(f"cannot write {path}: {said}; free some space or choose another folder with --out.")
