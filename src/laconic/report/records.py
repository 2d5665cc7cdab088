"""A run's folder, read again. Nothing here writes, and a run that is still going can be read too."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from laconic.core import DataError, printable
from laconic.engine import Record, in_use
from laconic.models import share_gone

RunState = Literal["finished", "running", "interrupted"]
"""How a run stands: it has a summary, or somebody is at it, or neither."""
RUN_FILES = ("config.toml", "metrics.jsonl", "summary.json", "split.json")
"""What is read of a run's folder."""


@dataclass(frozen=True)
class RunRecord:
    """What a run's folder says: configuration, a record per round, and a summary once it has ended."""

    path: Path
    config: Mapping[str, Mapping[str, Any]]
    history: list[Record]
    summary: Mapping[str, Any] | None
    split: Mapping[str, Any] | None = None
    running: bool = False

    @property
    def name(self) -> str:
        """The run's name: that of its folder."""
        return self.path.name

    @property
    def sparsity(self) -> float | None:
        """The share of the final model's parameters that are gone; what tables and reports show."""
        found = self.summary or {}
        if not found.keys() >= {"final_nonzero", "final_parameters", "parameters"}:
            return None
        # An ensemble has more parameters than the architecture.
        return share_gone(found["final_nonzero"], max(found["parameters"], found["final_parameters"]))

    @property
    def finished(self) -> bool:
        """Whether it has come to its end."""
        return self.summary is not None

    @property
    def state(self) -> RunState:
        """How it stood when it was read."""
        return "finished" if self.finished else "running" if self.running else "interrupted"


def read_run(path: Path) -> RunRecord:
    """A run's folder; `DataError` says what cannot be read.

    >>> read_run(Path("nowhere"))
    Traceback (most recent call last):
        ...
    laconic.core.errors.DataError: nowhere holds no run: it has no config.toml.
    """
    written = path / "config.toml"
    if not written.is_file():
        raise DataError(f"{path} holds no run: it has no config.toml.")
    running = in_use(path)  # asked first: a run that ends meanwhile has left its summary by then
    try:
        config = tomllib.loads(written.read_text(encoding="utf-8"))
        ended, split = _object(path / "summary.json"), _object(path / "split.json")
        return RunRecord(path, config, _records(path / "metrics.jsonl"), ended, split, running)
    except Exception as error:  # both decoders' errors are ValueErrors; what is nested a million deep is none
        said = printable(f"{type(error).__name__}: {error}")[:300]
        raise DataError(f"{path}: the run's files cannot be read ({said}).") from None


def _object(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    return _checked(json.loads(path.read_text(encoding="utf-8")), path)


def _records(path: Path) -> list[Record]:
    """The records of whole lines: the last line of a run that is going may be half written."""
    if not path.is_file():
        return []
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [Record.read(_checked(json.loads(line), path)) for line in whole.splitlines()]


def _checked(value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds no JSON object where one should stand")
    return value


def find_runs(folder: Path) -> list[Path]:
    """The folders of runs in a folder (the folder itself, where it holds one), by name."""
    if (folder / "config.toml").is_file():
        return [folder]
    return sorted(found.parent for found in folder.glob("*/config.toml") if not found.parent.is_symlink())
