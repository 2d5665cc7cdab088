"""The runs behind a result as a table: what each reached and what it cost, the mean over seeds."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from laconic.progress import size


class Column(NamedTuple):
    """A figure of the table: its heading, and its text from a run's figures and those of the first run."""

    heading: str
    text: Callable[[Mapping[str, float], Mapping[str, float]], str | None]


def _percent(key: str) -> Callable[[Mapping[str, float], Mapping[str, float]], str | None]:
    return lambda run, _: f"{100 * run[key]:.2f} %" if key in run else None


def _plain(key: str, text: Callable[[float], str]) -> Callable[[Mapping[str, float], Mapping[str, float]], str | None]:
    return lambda run, _: text(run[key]) if key in run else None


def _share(run: Mapping[str, float], first: Mapping[str, float]) -> str:
    own, base = (each["bytes_up"] + each["bytes_down"] for each in (run, first))
    return f"{100 * own / base:.3g} %"


COLUMNS = (
    Column("accuracy", lambda run, _: f"{run['accuracy']:.2f} %" if "accuracy" in run else None),
    Column("at the end", _percent("global_accuracy")),
    Column("local", _percent("local_accuracy")),
    Column("new", _percent("new_accuracy")),
    Column("vote", _percent("vote_accuracy")),
    Column("newcomer", _percent("newcomer_accuracy")),
    Column("AUC", _percent("auc")),
    Column("1st attribute told", _percent("posthoc_auc_0")),
    Column("2nd", _percent("posthoc_auc_1")),
    Column("rounds", _plain("rounds", "{:.0f}".format)),
    Column("up", _plain("bytes_up", lambda value: size(int(value)))),
    Column("down", _plain("bytes_down", lambda value: size(int(value)))),
    Column("both ways", _share),
    Column("bits up", _plain("bits_per_parameter_up", "{:.3f}".format)),
    Column("bits down", _plain("bits_per_parameter_down", "{:.3f}".format)),
    Column("sparsity", _percent("sparsity")),
    Column("weights left", _percent("nonzero")),
    Column("model", _plain("model_bytes", lambda value: size(int(value)))),
)
"""*accuracy* is the mean of the last ten evaluations; *both ways* is a share of the first run's bytes; *told* is the
AUC of an adversary that was fitted afterwards."""


def runs_table(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The lines of a Markdown table, a row for every configuration; columns of which no run knows anything are out.

    >>> cost = {"bytes_up": 2000, "bytes_down": 2000}
    >>> print("\\n".join(runs_table([{"name": "fedavg", "accuracy": 97.0, **cost}])))
    | | accuracy | up | down | both ways |
    |---|---:|---:|---:|---:|
    | fedavg | 97.00 % | 2.00 kB | 2.00 kB | 100 % |
    """
    seeds: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for run in runs:
        seeds[run["name"]].append(run)
    means = {name: _mean(several) for name, several in seeds.items()}
    first = next(iter(means.values()))
    rows = [[column.text(run, first) for column in COLUMNS] for run in means.values()]
    shown = [place for place in range(len(COLUMNS)) if any(row[place] is not None for row in rows)]
    lines = ["| | " + " | ".join(COLUMNS[place].heading for place in shown) + " |", "|---|" + "---:|" * len(shown)]
    for (name, several), row in zip(seeds.items(), rows, strict=True):
        called = name if len(several) == 1 else f"{name} ({len(several)} seeds)"
        lines.append(f"| {called} | " + " | ".join(row[place] or "–" for place in shown) + " |")
    return lines


def _mean(several: list[Mapping[str, Any]]) -> dict[str, float]:
    keys = [key for key, value in several[0].items() if isinstance(value, int | float)]
    return {key: statistics.fmean(run[key] for run in several) for key in keys if all(key in run for run in several)}
