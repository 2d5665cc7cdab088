"""What a comparison found: a row per entry, the mean and the standard deviation over seeds."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from laconic.core import ConfigError
from laconic.engine import bytes_to_reach
from laconic.progress import size
from laconic.report import RunRecord

Row = dict[str, Any]
"""An entry's figures: plain values, `…_std` beside each mean."""


@dataclass(frozen=True)
class Target:
    """The figure that is to be reached, and by how much."""

    value: float
    figure: str = "global_accuracy"

    @classmethod
    def parse(cls, target: float | str) -> Target:
        """From a number, or from text.

        >>> Target.parse(0.9), Target.parse("local_accuracy=0.95")
        (Target(value=0.9, figure='global_accuracy'), Target(value=0.95, figure='local_accuracy'))
        """
        figure, equals, value = str(target).rpartition("=")
        try:
            return cls(float(value), figure.strip()) if equals else cls(float(value))
        except ValueError:
            raise ConfigError(f"target is a number or figure=number (local_accuracy=0.9), got {target!r}.") from None


class Column(NamedTuple):
    """A figure of the table: its key, what stands above it, and how it is written."""

    key: str
    title: str
    text: Callable[[float], str]


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


COLUMNS = (
    Column("global_accuracy", "global accuracy", _percent),
    Column("local_accuracy", "local accuracy", _percent),
    Column("new_accuracy", "new accuracy", _percent),
    Column("global_loss", "loss", lambda value: f"{value:.4g}"),
    Column("bytes_up", "up", size),
    Column("bytes_down", "down", size),
    Column("bytes_total", "both ways", size),
    Column("bits_per_parameter_up", "bits up", lambda value: f"{value:.2f}"),
    Column("bits_per_parameter_down", "bits down", lambda value: f"{value:.2f}"),
    Column("bytes_to_target", "to target", size),
    Column("sparsity", "sparsity", _percent),
    Column("model_bytes", "model", size),
    Column("seconds", "seconds", lambda value: f"{value:.1f}"),
)


def figures(record: RunRecord, target: Target | None = None) -> dict[str, float | None]:
    """The table's figures of one finished run."""
    summary = record.summary or {}
    found = {
        **{column.key: summary.get(column.key) for column in COLUMNS},
        "bytes_total": summary["bytes_up"] + summary["bytes_down"],
        "sparsity": record.sparsity,
    }
    if target is not None:
        found["bytes_to_target"] = bytes_to_reach(record.history, target.value, target.figure)
    return found


def row_of(name: str, runs: Sequence[Mapping[str, float | None]], failures: Sequence[str] = ()) -> Row:
    """An entry's row from the figures of its runs."""
    row: Row = {"name": name, "runs": len(runs), "failures": list(failures)}
    for column in COLUMNS:
        values = [value for run in runs if (value := run[column.key]) is not None]
        row[column.key] = statistics.fmean(values) if values else None
        row[f"{column.key}_std"] = statistics.stdev(values) if len(values) > 1 else None
    row["reached_target"] = sum(run["bytes_to_target"] is not None for run in runs)
    return row


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells as text, without columns of which no row knows anything. A loss is for want of accuracy."""
    shown = [column for column in COLUMNS if any(row[column.key] is not None for row in rows)]
    if any(row["global_accuracy"] is not None for row in rows):
        shown = [column for column in shown if column.key != "global_loss"]
    lines = [[_name(row), *(_cell(column, row) for column in shown)] for row in rows]
    return ["", *(column.title for column in shown)], lines


def _name(row: Row) -> str:
    total = row["runs"] + len(row["failures"])
    return row["name"] if not row["failures"] else f"{row['name']} ({len(row['failures'])} of {total} failed)"


def _cell(column: Column, row: Row) -> str:
    mean, deviation = row[column.key], row[f"{column.key}_std"]
    if mean is None:
        return "–"
    text = column.text(mean)
    if deviation and _shows(column, mean, deviation):
        text = f"{text.removesuffix(' %')} ± {column.text(deviation)}"
    if column.key == "bytes_to_target" and row["reached_target"] < row["runs"]:
        text += f" ({row['reached_target']} of {row['runs']})"
    return text


def _shows(column: Column, mean: float, deviation: float) -> bool:
    """Whether a deviation is more than the digits that are written."""
    return deviation >= 0.005 * mean if column.text is size else column.text(deviation) != column.text(0.0)


def markdown(rows: Sequence[Row]) -> list[str]:
    """The lines of a Markdown table."""
    headings, lines = cells(rows)
    made = ["| " + " | ".join(headings) + " |", "|---|" + "---:|" * (len(headings) - 1)]
    return made + ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def terminal(rows: Sequence[Row]) -> Table:
    """The table for a terminal."""
    headings, lines = cells(rows)
    made = Table(box=None, pad_edge=False)
    for heading in headings:
        # Names may wrap, numbers never.
        made.add_column(heading, justify="right" if heading else "left", overflow="fold", no_wrap=bool(heading))
    for line in lines:
        made.add_row(*map(Text, line))  # a name may look like markup
    return made


_LATEX = {"\\": r"\textbackslash{}", **{sign: f"\\{sign}" for sign in "&%$#_{}"}, "~": r"\textasciitilde{}"}
_LATEX |= {"^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--"}


def latex(rows: Sequence[Row]) -> str:
    """A LaTeX table (package booktabs)."""
    headings, lines = cells(rows)
    written = [
        " & ".join("".join(_LATEX.get(sign, sign) for sign in cell) for cell in line) for line in [headings, *lines]
    ]
    top, *body = (f"{line} \\\\" for line in written)
    columns = "l" + "r" * (len(headings) - 1)
    return "\n".join(
        [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", top, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", ""]
    )


def comma_separated(rows: Iterable[Row]) -> str:
    """CSV, numbers in full."""
    text = io.StringIO()
    plain = [{**row, "failures": "; ".join(row["failures"])} for row in rows]
    writer = csv.DictWriter(text, fieldnames=list(plain[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(plain)
    return text.getvalue()
