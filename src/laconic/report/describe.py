"""Runs as the page wants them: curves, groups of seeds, splits, settings; plain values that JSON can hold."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any

import tomli_w

from laconic.core import DataError
from laconic.engine import versions
from laconic.report.records import RunRecord

Described = dict[str, Any]
"""Plain values."""

MOST_POINTS = 2000
"""Points of a curve at the most: beyond it evaluations are left out evenly, rounds averaged, and the page says so."""
_LONG = 48  # characters of settings after which a run's name says more than they do
_USUAL = (None, "float32", "mask")  # codecs that go without saying: whole values, and what mask methods are made for
_FIGURES = ("global_", "local_", "newcomer_", "sparsity")
_COUNTS = {"local_clients", "newcomer_clients"}
_ABSENT = {"nonzero": "sparsity", "kept": "sparsity"}  # what is left, in records of 0.1 that do not say what is gone
_TOTALS = (
    *("bits_per_parameter_up", "bits_per_parameter_down", "model_bytes", "parameters", "final_parameters"),
    *("rejected", "abandoned", "state_sha256", "new_accuracy", "paper_bytes"),
)
# Settings that tell runs of one group apart: the seed, what follows from it, and what does not change the result.
_OF_ONE_RUN = {
    *("run.name", "run.seed", "run.workers", "run.checkpoint_every", "run.store", "data.seed"),
    *("data.sha256", "model.first_state_sha256"),
}


def describe_run(run: RunRecord) -> Described:
    """One run: its curves, its figures, and how to repeat it."""
    try:
        found = _described(run)
        json.dumps(found, allow_nan=False)  # what one run has that JSON has not must not cost the page the others
        return found
    except Exception as error:  # files that others may have written: deep, infinite, of other types
        raise DataError(f"{run.path}: its files are not those of a run ({error!r}).") from None


def describe(
    runs: Sequence[Described],
    *,
    unreadable: Sequence[Mapping[str, str]] = (),
    entries: Sequence[str | None] = (),
) -> Described:
    """All that a page shows: runs as `describe_run` gives them, grouped; those of one group differ in their seeds.

    `entries` are the names that runs have in a comparison, which groups then have too.
    """
    groups: list[Described] = []
    splits: list[Any] = []
    shown: list[Described] = []
    for run, entry in zip(runs, entries or [None] * len(runs), strict=True):
        settings = {key: value for key, value in run["settings"].items() if key not in _OF_ONE_RUN}
        alike = (i for i, group in enumerate(groups) if group["settings"] == settings and group["entry"] == entry)
        number = next(alike, len(groups))
        if number == len(groups):
            groups.append({"settings": settings, "name": run["name"], "entry": entry})
        if run["split"] is not None and run["split"] not in splits:
            splits.append(run["split"])
        split = None if run["split"] is None else splits.index(run["split"])
        shown.append({**{k: v for k, v in run.items() if k != "settings"}, "group": number, "split": split})
    _fill_sparsity(shown)
    different = _different(groups)
    for group, label in zip(groups, _labels(groups, different), strict=True):
        group["label"] = group["entry"] or label
    return {
        "title": _title(groups),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "laconic": versions()["laconic"],
        "groups": [{"label": g["label"], "settings": {k: g["settings"].get(k) for k in different}} for g in groups],
        "different": different,
        "runs": shown,
        "splits": splits,
        "unreadable": list(unreadable),
    }


# --- one run -------------------------------------------------------------------------------------------------------


def _described(run: RunRecord) -> Described:
    history, summary = run.history, run.summary or {}
    evaluated = [i for i, record in enumerate(history) if record.evaluation]
    every = -(-len(evaluated) // MOST_POINTS) or 1
    evaluated = [*evaluated[:-1:every], *evaluated[-1:]]
    sent = {way: list(accumulate(int(record[f"bytes_{way}"]) for record in history)) for way in ("up", "down")}
    evaluations = [_figures(history[i]) for i in evaluated]
    names = sorted({name for figures in evaluations for name in figures})
    flat = _flattened(run.config)
    from_python = "model.first_state_sha256" in flat
    return {
        "name": run.name,
        "state": run.state,
        "seed": flat.get("run.seed"),
        "round": int(history[-1]["round"]) if history else 0,
        "rounds": int(summary.get("rounds") or _planned(flat)),
        "method": str(flat.get("method.name", "?")),
        "data": str(summary.get("data", flat.get("data.source", "?"))),
        "model": str(flat.get("model.name", "?")),
        "settings": flat,
        "evaluations": {
            "round": [int(history[i]["round"]) for i in evaluated],
            "up": [sent["up"][i] for i in evaluated],
            "down": [sent["down"][i] for i in evaluated],
            "every": every,
            # Of a model of which nothing is gone, records say nothing.
            "figures": {
                name: [figures.get(name, 0 if name.startswith("sparsity") else None) for figures in evaluations]
                for name in names
            },
        },
        "traffic": _traffic(history),
        "totals": {
            "up": sent["up"][-1] if history else 0,
            "down": sent["down"][-1] if history else 0,
            "seconds": _short(sum(float(record["seconds"]) for record in history)),
            **{name: _short(summary[name]) for name in _TOTALS if summary.get(name) is not None},
            **({} if run.sparsity is None else {"sparsity": _short(run.sparsity)}),
        },
        "split": run.split,
        "toml": tomli_w.dumps(dict(run.config)),
        "command": None if from_python else f"laconic run {shlex.quote(str(run.path / 'config.toml'))} --out repeated",
        "versions": {str(k): str(v) for k, v in dict(summary.get("versions") or {}).items()},
    }


def _planned(flat: Mapping[str, Any]) -> int:
    late = sum(int(flat.get(f"{n}.rounds", 0)) for n in ("newcomer", "new_device") if flat.get(f"{n}.enabled"))
    return int(flat.get("run.rounds", 0)) + late


def _figures(record: Mapping[str, Any]) -> dict[str, float | None]:
    """The figures of an evaluation; where only what is left of a model is said, it is said as what is gone from it."""
    found: dict[str, float | None] = {}
    for name, value in record.items():
        first, slash, layer = name.partition("/")
        if first in _ABSENT and _is_number(value) and "sparsity" not in record:
            name, value = _ABSENT[first] + slash + layer, 1 - value
        if name.startswith(_FIGURES) and name not in _COUNTS and (value is None or _is_number(value)):
            found[name] = _short(value)
    return found


def _traffic(history: Sequence[Mapping[str, Any]]) -> Described:
    """Bytes of every round; of many rounds, means over so many that follow each other."""
    width = -(-len(history) // MOST_POINTS) or 1
    pieces = [history[i : i + width] for i in range(0, len(history), width)]
    return {
        "width": width,
        "round": [int(piece[-1]["round"]) for piece in pieces],
        **{
            way: [_short(sum(int(record[f"bytes_{way}"]) for record in piece) / len(piece)) for piece in pieces]
            for way in ("up", "down")
        },
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> Any:
    """Figures with the digits that can be seen; what is not finite is absent."""
    if isinstance(value, float):
        short = float(f"{value:.7g}") if math.isfinite(value) else None
        return int(short) if short is not None and short.is_integer() and abs(short) < 2**53 else short
    return value


def _flattened(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{prefix}{key}"
        flat.update(_flattened(value, f"{path}.") if isinstance(value, Mapping) else {path: _plain(value)})
    return flat


def _plain(value: Any) -> Any:
    """A setting as the page shows it: TOML also has dates and infinite numbers, which JSON has not."""
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return value if isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)) else str(value)


def _fill_sparsity(runs: Sequence[Described]) -> None:
    """A run of which nothing is gone says nothing of sparsity; beside others of its group, that is a curve at 0."""
    named: dict[int, dict[str, None]] = {}
    for run in runs:
        names = (name for name in run["evaluations"]["figures"] if name.startswith("sparsity"))
        named.setdefault(run["group"], {}).update(dict.fromkeys(names))
    for run in runs:
        evaluations = run["evaluations"]
        nothing = {name: [0] * len(evaluations["round"]) for name in named[run["group"]]}
        run["evaluations"] = {**evaluations, "figures": {**nothing, **evaluations["figures"]}}


# --- groups --------------------------------------------------------------------------------------------------------


def _different(groups: Sequence[Described]) -> list[str]:
    """The settings in which groups differ, in the order of the files."""
    keys = dict.fromkeys(key for group in groups for key in group["settings"])
    return [key for key in keys if any(g["settings"].get(key) != groups[0]["settings"].get(key) for g in groups)]


def _labels(groups: Sequence[Described], different: Sequence[str]) -> list[str]:
    """Short names: the method, its link where links differ, and whatever else tells groups of one name apart."""
    labels = [_label(group["settings"], different) for group in groups]
    for label in dict.fromkeys(labels):
        alike = [i for i, each in enumerate(labels) if each == label]
        if len(alike) == 1:
            continue
        keys = _different([groups[i] for i in alike])
        for i in alike:
            more = "".join(f", {key.partition('.')[2]}={groups[i]['settings'].get(key, '–')}" for key in keys)
            labels[i] += more if len(more) <= _LONG else f" ({groups[i]['name']})"
    return labels


def _label(settings: Mapping[str, Any], different: Sequence[str]) -> str:
    label = str(settings.get("method.name", "?"))
    for way, mark in (("up", "↑"), ("down", "↓")):
        codec = settings.get(f"link.{way}")
        if f"link.{way}" in different and codec not in _USUAL:
            label += f" {mark} {codec}"
    return label


def _title(groups: Sequence[Described]) -> str:
    if not groups:
        return "No runs yet"
    sources = [str(group["settings"].get("data.source", "?")).removeprefix("Federation(") for group in groups]
    where = ", ".join(dict.fromkeys(source.partition(":")[0] for source in sources))
    if len(groups) == 1:
        return f"{groups[0]['label']} on {where}"
    methods = {group["settings"].get("method.name") for group in groups}
    return f"{len(groups)} {'methods' if len(methods) == len(groups) else 'settings'} on {where}"
