"""A run's figures for TensorBoard, written as they come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laconic.engine import Record, needed


class TensorBoard:
    """An observer that writes every number of a round's record as a scalar, and the bytes so far as `bytes_total`."""

    def __init__(self, folder: Path) -> None:
        needed("tensorboard", "--tensorboard", extra="tensorboard")
        self._folder = folder
        self._writer: Any = None
        self._sent = 0

    def started(self, *, rounds: int, history: Sequence[Record]) -> None:
        """Begin the log, or go on with it: what an interrupted run wrote after its checkpoint no longer counts."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self._folder, purge_step=len(history) + 1 if history else None)
        self._sent = sum(record["bytes_up"] + record["bytes_down"] for record in history)

    def advanced(self, record: Record) -> None:
        """Write a round's scalars."""
        self._sent += record["bytes_up"] + record["bytes_down"]
        for name, value in {**record, "bytes_total": self._sent}.items():
            if isinstance(value, int | float) and name != "round":
                self._writer.add_scalar(name, value, record["round"])
        self._writer.flush()  # whoever looks on sees the last whole round, and a crash loses nothing

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Close the log."""
        self._writer.close()
