from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

_REPOSITORY = Path(__file__).resolve().parents[2]
_REAL = Path(os.environ.get("LACONIC_DATA") or _REPOSITORY.parent / "shared" / "data")


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, session_cache: Path) -> None:
    """No test reads the user's data folder or writes to the user's cache."""
    monkeypatch.setenv("LACONIC_CACHE", str(session_cache))
    monkeypatch.delenv("LACONIC_DATA", raising=False)


@pytest.fixture
def real_data(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Point LACONIC_DATA at the real data, or skip where a dataset is not there."""

    def need(folder: str) -> Path:
        if not (_REAL / folder).is_dir():
            pytest.skip(f"the real dataset {folder!r} is not in {_REAL}")
        monkeypatch.setenv("LACONIC_DATA", str(_REAL))
        return _REAL / folder

    return need


def encoded(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return stream.getvalue()


@pytest.fixture
def write_split() -> Callable[..., list[np.ndarray]]:
    """Write a few random images and columns in the hub's layout; gives the pixels."""

    def write(
        folder: Path,
        split: str,
        columns: dict[str, list[object]],
        *,
        image: str = "image",
        shape: tuple[int, ...] = (28, 28),
        sizes: list[tuple[int, int]] | None = None,
        kind: str = "PNG",
        files: int = 1,
    ) -> list[np.ndarray]:
        rng = np.random.default_rng(len(split))
        rows = len(next(iter(columns.values())))
        shapes = [shape] * rows if sizes is None else [(*size, *shape[2:]) for size in sizes]
        pixels = [rng.integers(0, 256, size=one, dtype=np.uint8) for one in shapes]
        folder.mkdir(parents=True, exist_ok=True)
        for i, part in enumerate(np.array_split(np.arange(rows), files)):
            table = {
                image: [{"bytes": encoded(pixels[r], kind), "path": None} for r in part],
                **{name: [values[r] for r in part] for name, values in columns.items()},
            }
            pq.write_table(pa.table(table), folder / f"{split}-{i:05d}-of-{files:05d}.parquet")
        return pixels

    return write
