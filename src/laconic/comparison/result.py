"""What a comparison found, and the files that say so."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laconic.comparison.table import Row, Target, comma_separated, figures, latex, markdown, row_of
from laconic.core import ConfigError
from laconic.engine import plot, versions
from laconic.engine.files import write_atomically
from laconic.report import RunRecord, write_report

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Outcome:
    """How a run of a comparison ended: in `path`, well, or with a `failure`."""

    entry: str
    seed: int
    path: Path
    failure: str | None = None


@dataclass(frozen=True)
class Comparison:
    """What a comparison gave. Its `table` is made of plain dictionaries: `pandas.DataFrame(comparison.table)`."""

    outcomes: tuple[Outcome, ...]
    runs: Mapping[str, Sequence[RunRecord]]
    """The finished runs of every entry, in the order of their seeds."""
    target: Target | None = None
    folder: Path | None = None

    @property
    def failures(self) -> list[Outcome]:
        """The runs that failed."""
        return [outcome for outcome in self.outcomes if outcome.failure is not None]

    @cached_property
    def table(self) -> list[Row]:
        """A row per entry: the mean over seeds of every figure, and beside it its standard deviation (`…_std`)."""
        return [
            row_of(
                name,
                [figures(record, self.target) for record in records],
                [f"seed {outcome.seed}: {outcome.failure}" for outcome in self.failures if outcome.entry == name],
            )
            for name, records in self.runs.items()
        ]

    def notes(self) -> list[str]:
        """What is to be known beside the table: failures, the target, and conditions that were not equal."""
        said = [f"{run.entry}, seed {run.seed}, failed: {run.failure}" for run in self.failures]
        if self.target is not None:
            said.append(f"to target: bytes both ways until {self.target.figure} ≥ {self.target.value:g}")
        said += [
            f"not equal: {key} ({'; '.join(f'{name}: {value}' for name, value in values.items())})"
            for key, values in self.unequal().items()
        ]
        return said

    def unequal(self) -> dict[str, dict[str, Any]]:
        """Settings of data, model and schedule that were not the same for all entries."""
        found: dict[str, dict[str, Any]] = {}
        by_seed = {
            name: {record.config["run"]["seed"]: record.config for record in records}
            for name, records in self.runs.items()
            if records
        }
        seeds = set.intersection(*map(set, by_seed.values())) if by_seed else set()
        if not seeds:
            return {}
        conditions = {name: _conditions(configs[min(seeds)]) for name, configs in by_seed.items()}
        for key in sorted({key for one in conditions.values() for key in one}):
            values = {name: one.get(key) for name, one in conditions.items()}
            if len({repr(value) for value in values.values()}) > 1:
                found[key] = values
        return found

    def to_markdown(self) -> str:
        """The table and its notes."""
        return "\n".join([*markdown(self.table), "", *(f"- {note}" for note in self.notes())]).rstrip() + "\n"

    def to_csv(self) -> str:
        """The table, numbers in full."""
        return comma_separated(self.table)

    def to_latex(self) -> str:
        """The table for LaTeX (package booktabs)."""
        return latex(self.table)

    def to_json(self) -> str:
        """The table, every run's figures, and what they were made with."""
        found = {record.path: figures(record, self.target) for records in self.runs.values() for record in records}
        every = [
            {
                "name": run.entry,
                "seed": run.seed,
                "folder": run.path.name,
                "failure": run.failure,
                **found.get(run.path, {}),
            }
            for run in self.outcomes
        ]
        target = None if self.target is None else {"figure": self.target.figure, "value": self.target.value}
        made = {"target": target, "table": self.table, "runs": every, "notes": self.notes(), "versions": versions()}
        return json.dumps(made, indent=1, allow_nan=False, ensure_ascii=False) + "\n"

    def plot(self, *, metric: str = "global_accuracy", axes: Axes | None = None) -> Axes:
        """Draw accuracy against bytes, a line per entry: the mean over seeds, and each seed thinly (matplotlib)."""
        histories = {name: [record.history for record in records] for name, records in self.runs.items() if records}
        return plot(histories, metric=metric, axes=axes)

    def write(self, folder: Path) -> None:
        """Leave the table as table.md, table.csv, table.tex and table.json."""
        texts = {"md": self.to_markdown(), "csv": self.to_csv(), "tex": self.to_latex(), "json": self.to_json()}
        for suffix, text in texts.items():
            write_atomically(folder / f"table.{suffix}", text.encode())

    def report(self, out: Path) -> Path | None:
        """Write the page of all finished runs; None where there are none."""
        if self.folder is None:
            raise ConfigError("report: the runs left no files; say where with out.")
        entries = {record.path: name for name, records in self.runs.items() for record in records}
        return write_report(list(entries), out, entries=entries) if entries else None


_OWN = {"name", "seed", "workers", "store", "checkpoint_every", "first_state_sha256"}  # a run's own, or no condition


def _conditions(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section in ("run", "data", "model")
        for key, value in config.get(section, {}).items()
        if key not in _OWN or (section, key) == ("model", "name")
    }
