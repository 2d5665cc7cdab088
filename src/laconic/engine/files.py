"""Files that are either whole or absent."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import IO

from laconic.core import RunError

TEMPORARY = ".tmp-"


def write_atomically(path: Path, data: bytes) -> None:
    """Write under a temporary name, sync, rename, sync the folder: no reader ever sees half a file."""
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # what keeps us from writing may keep us from deleting
            temporary.unlink(missing_ok=True)
        raise cannot_write(path, error) from None


def remove_temporaries(folder: Path) -> None:
    """Remove what a process left that was killed while it wrote. Only for who holds the folder's lock."""
    for path in folder.glob(f"{TEMPORARY}*"):
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make a rename durable."""
    handle = os.open(folder, os.O_RDONLY)
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
