"""A cache of decoded images on disk: plain `.npy` files, never pickles.

It lies in `LACONIC_CACHE`, else in `laconic` in the user's cache folder. A file that is missing, damaged or of the
wrong size is made anew, and a folder that can't be written costs time only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_FORMAT = "1"  # change it whenever decoding gives other bytes


def cache_folder() -> Path:
    """Where decoded images are kept."""
    if own := os.environ.get("LACONIC_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "laconic"
    return Path.home() / ".cache" / "laconic"


def file_key(path: Path, *how: object) -> str:
    """A name for what is decoded from this file as it now is, in this way."""
    status = path.stat()
    text = "\0".join(map(str, (_FORMAT, path.resolve(), status.st_size, status.st_mtime_ns, *how)))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load_cached(key: str, *, rows: int) -> NDArray[np.uint8] | None:
    """The cached images, or None where there are none that can be trusted."""
    path = cache_folder() / "decoded" / f"{key}.npy"
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 4 or len(array) != rows:
        return None
    return array


def save_cached(key: str, array: NDArray[np.uint8]) -> None:
    """Keep decoded images: written under a temporary name, then renamed."""
    folder = cache_folder() / "decoded"
    temporary: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{key}-", delete=False) as file:
            temporary = Path(file.name)
            np.save(file, array, allow_pickle=False)
        temporary.replace(folder / f"{key}.npy")
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
