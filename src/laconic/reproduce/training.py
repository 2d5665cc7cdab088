"""Recipes that train: configurations, what the paper says of each, and rows from the records of their runs.

Finished runs are not repeated. What a run leaves is kept beside the recipe's result as NAME-sSEED.toml, .jsonl and
.summary.json; a record of the very same configuration that lies elsewhere is taken up instead of being trained again.
"""

from __future__ import annotations

import json
import math
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w

from laconic.comparison import compare_tables
from laconic.config import Table, overridden, resolved, sections
from laconic.core import DataError, RunError, UserError
from laconic.engine import Record, changes, curve, plot
from laconic.engine.files import write_atomically
from laconic.engine.run import without_none
from laconic.report import RunRecord, find_runs, read_run
from laconic.reproduce.recipe import Job, Outcome, Recipe, Row

_COUNTED = (("run", "rounds"), ("method", "fedavg_rounds"), ("method", "decay_rounds"), ("newcomer", "rounds"))
"""Numbers of which there are fewer at a smaller scale."""
_OWN = {"run.name", "run.eval_every", "run.layout"}  # what may differ besides where a record is taken up


Runs = Mapping[str, Sequence[RunRecord]]
Picture = Callable[[Runs, Any], None]


@dataclass(frozen=True)
class Figure:
    """A figure of a run, as a paper prints it. `of` takes it from a run, and from that of the first arm where it is."""

    label: str
    of: Callable[[RunRecord, RunRecord | None], float | None]
    tolerance: float | None = None


@dataclass(frozen=True)
class Arm:
    """One configuration of a recipe, and the paper's figures of it by their labels.

    `settings` change the recipe's common table, `small` what is run below full scale, both as `--set` does it.
    `seeds` is how many of the recipe's seeds it has (all).
    """

    name: str
    settings: tuple[str, ...] = ()
    paper: Mapping[str, float] = field(default_factory=dict)
    small: tuple[str, ...] = ()
    seeds: int | None = None


@dataclass(frozen=True)
class Training:
    """Several configurations at full scale, and what of them is compared with a paper.

    Below full scale, rounds are fewer and the settings `small` hold besides; `scale` is the scale that they are for.
    """

    common: str
    arms: tuple[Arm, ...]
    figures: tuple[Figure, ...]
    scale: float = 1.0
    small: tuple[str, ...] = ()
    seeds: int = 1
    picture: Picture | None = None
    """Draws the runs, by arm, on a figure: accuracy against the bytes of both ways, unless given."""

    def table(self, arm: Arm, *, scale: float = 1.0) -> Table:
        """An arm's configuration.

        >>> training = Training("[run]\\nrounds = 200", (Arm("fedavg"),), (), small=("model.name=lenet5",), scale=0.1)
        >>> small = training.table(training.arms[0], scale=0.05)
        >>> small["run"]["rounds"], small["model"]["name"]
        (10, 'lenet5')
        """
        table = overridden(tomllib.loads(self.common), arm.settings)
        if scale < 1:
            full = {place: table.get(place[0], {}).get(place[1]) for place in _COUNTED}
            small = (*self.small, *arm.small)
            overridden(table, small)
            stated = {change.partition("=")[0] for change in small}
            for section, key in _COUNTED:
                if key in table.get(section, {}):
                    # What `small` states is for the recipe's own scale, all else is a share of the full number.
                    share = scale / self.scale if f"{section}.{key}" in stated else scale
                    count = table[section][key]
                    most = max(count, full[section, key] or count)
                    table[section][key] = min(most, max(1, math.ceil(count * share - 1e-9)))
        return sections(table, where=arm.name)

    def __call__(self, job: Job) -> Outcome:
        """Take up what is there, train what is missing, and compare."""
        tables = {arm.name: self.table(arm, scale=job.scale) for arm in self.arms}
        seeds = {arm.name: range(job.seed, job.seed + (arm.seeds or self.seeds)) for arm in self.arms}
        runs = {(name, seed): _kept(job, name, tables[name], seed) for name in tables for seed in seeds[name]}
        missing: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name in tables:
            if absent := tuple(seed for seed in seeds[name] if runs[name, seed] is None):
                missing[absent].append(name)
        if job.train:
            for absent, names in missing.items():
                runs |= _trained(job, {name: tables[name] for name in names}, absent)
        made = {place: run for place, run in runs.items() if run is not None}
        if not made:
            raise RunError(f"reproduce: no run of this recipe is finished in {job.folder.parent}; let it train.")
        found: dict[str, list[RunRecord]] = defaultdict(list)
        for (name, _), run in made.items():
            found[name].append(run)
        return Outcome(
            rows=tuple(self._rows(made)),
            data={
                "runs": [_said(name, run) for (name, _), run in made.items()],
                "missing": [f"{name}, seed {seed}" for name, seed in runs if (name, seed) not in made],
            },
            draw=partial(self.picture or against_bytes, found),
            seconds=sum((run.summary or {}).get("seconds", 0.0) for run in made.values()),
        )

    def _rows(self, made: Mapping[tuple[str, int], RunRecord]) -> Iterator[Row]:
        for arm in self.arms:
            runs = [
                (run, made.get((self.arms[0].name, seed))) for (name, seed), run in made.items() if name == arm.name
            ]
            for figure in self.figures:
                values = [value for run, first in runs if (value := figure.of(run, first)) is not None]
                if not values:
                    continue
                paper = arm.paper.get(figure.label)
                note = f"{len(runs[0][0].history)} rounds"
                if len(values) > 1:
                    note += f", {len(values)} seeds, standard deviation {statistics.stdev(values):.2g}"
                yield Row(
                    f"{arm.name}: {figure.label}",
                    statistics.fmean(values),
                    paper=paper,
                    tolerance=None if paper is None else figure.tolerance,
                    note=note,
                )


def training_recipe(name: str, reproduces: str, training: Training, *, seconds: float) -> Recipe:
    """A recipe that trains. `seconds` is about how long all of its runs take at the scale of `training`."""
    return Recipe(
        name=name,
        reproduces=reproduces,
        run=training,
        settings={arm.name: training.table(arm) for arm in training.arms},
        paper={f"{arm.name}: {label}": value for arm in training.arms for label, value in arm.paper.items()},
        seconds=seconds,
        scale=training.scale,
    )


# --- figures ---------------------------------------------------------------------------------------------------------


def last_evaluations(run: RunRecord, _: RunRecord | None = None) -> float | None:
    """The mean of the last ten evaluations of the global accuracy, in per cent."""
    found = [record["global_accuracy"] for record in run.history if record.get("global_accuracy") is not None]
    return 100 * statistics.fmean(found[-10:]) if found else None


def summed_up(key: str, *, times: float = 1.0) -> Callable[[RunRecord, RunRecord | None], float | None]:
    """A figure of the summary."""

    def of(run: RunRecord, _: RunRecord | None) -> float | None:
        value = (run.summary or {}).get(key)
        return None if value is None else times * value

    return of


def paper_share(run: RunRecord, first: RunRecord | None) -> float | None:
    """The volume that the paper counts, in per cent of the first arm's: it does not depend on the number of rounds."""
    return _share(run, first, "paper_bytes")


def byte_share(run: RunRecord, first: RunRecord | None) -> float | None:
    """Bytes of real frames, both ways, in per cent of the first arm's."""
    return _share(run, first, "bytes_up", "bytes_down")


def _share(run: RunRecord, first: RunRecord | None, *keys: str) -> float | None:
    if first is None:
        return None
    own, base = (
        sum((record.summary or {}).get(key, 0) for key in keys) / len(record.history) for record in (run, first)
    )
    return 100 * own / base if base else None


# --- records ---------------------------------------------------------------------------------------------------------


def _kept(job: Job, name: str, table: Table, seed: int) -> RunRecord | None:
    """The record of this very run: the recipe's own, or another's that is then kept as its own."""
    wanted = resolved({**table, "run": {**table["run"], "seed": seed}})
    stem = job.folder / f"{name}-s{seed}"
    places = [job.folder, *job.adopt, *sorted(path for path in job.folder.parent.glob("*") if path.is_dir())]
    for record in (record for place in places for record in _records(place)):
        config = _resolved(record.config)
        if record.summary is None or any(key not in _OWN for key, _, _ in changes(config, wanted)):
            continue
        if record.path != stem:
            _keep(replace(record, config=config), stem)
        return _read(stem)
    return None


def _resolved(config: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    try:
        return resolved(sections(config, where="record"))
    except UserError:
        return config  # not from a file, or from another version


def _records(folder: Path) -> Iterator[RunRecord]:
    """Runs' folders, and records that were kept without their models and checkpoints."""
    for path in find_runs(folder) if folder.is_dir() else ():
        yield read_run(path)
    for summary in sorted(folder.glob("*.summary.json")):
        stem = summary.with_name(summary.name.removesuffix(".summary.json"))
        if _file(stem, "toml").is_file():
            yield _read(stem)


def _file(stem: Path, suffix: str) -> Path:
    return stem.with_name(f"{stem.name}.{suffix}")


def _read(stem: Path) -> RunRecord:
    try:
        lines = _file(stem, "jsonl").read_text(encoding="utf-8").splitlines()
        return RunRecord(
            stem,
            tomllib.loads(_file(stem, "toml").read_text(encoding="utf-8")),
            [Record.read(json.loads(line)) for line in lines],
            json.loads(_file(stem, "summary.json").read_text(encoding="utf-8")),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{stem}: the record of the run cannot be read ({error}).") from None


def _keep(record: RunRecord, stem: Path) -> None:
    """Configuration, history and, last, the summary: where it stands, the others belong to it."""
    lines = "".join(json.dumps(line.line(), allow_nan=False) + "\n" for line in record.history)
    write_atomically(_file(stem, "toml"), tomli_w.dumps(without_none(record.config)).encode())
    write_atomically(_file(stem, "jsonl"), lines.encode())
    write_atomically(_file(stem, "summary.json"), json.dumps(record.summary, indent=2).encode() + b"\n")


def _trained(job: Job, tables: Mapping[str, Table], seeds: Iterable[int]) -> dict[tuple[str, int], RunRecord | None]:
    """Run what is missing, as many at a time as there are cores; an interrupted run goes on where it stopped."""
    comparison = compare_tables(tables.items(), out=job.folder / "runs", seeds=tuple(seeds), cluster=job.cluster)
    made: dict[tuple[str, int], RunRecord | None] = {}
    for outcome in comparison.outcomes:
        if outcome.failure is None:
            stem = job.folder / f"{outcome.entry}-s{outcome.seed}"
            _keep(read_run(outcome.path), stem)
            made[outcome.entry, outcome.seed] = _read(stem)
    for failed in comparison.failures:
        raise RunError(f"reproduce: {failed.entry}, seed {failed.seed}, failed: {failed.failure}")
    return made


_SAID = (
    *("seed", "rounds", "parameters", "global_accuracy", "local_accuracy", "new_accuracy", "newcomer_accuracy"),
    *("vote_accuracy", "auc", "posthoc_auc_0", "posthoc_auc_1", "global_parameters", "new_test_bytes_up"),
    *("bytes_up", "bytes_down", "bits_per_parameter_up", "bits_per_parameter_down", "sparsity", "removed", "nonzero"),
    *("model_bytes", "seconds", "state_sha256", "versions"),
)


def _said(name: str, run: RunRecord) -> dict[str, Any]:
    """What a result says of a run that it is made of."""
    summary = run.summary or {}
    found = {"accuracy": last_evaluations(run)}
    return {"name": name, "record": run.name, **found, **{key: summary[key] for key in _SAID if key in summary}}


# --- pictures --------------------------------------------------------------------------------------------------------


def against_bytes(found: Runs, figure: Any) -> None:
    """Accuracy against the bytes of both ways."""
    histories = {name: [run.history for run in runs] for name, runs in found.items()}
    lines = [line for runs in histories.values() for run in runs for line in run]
    metric = next(key for key in ("global_accuracy", "local_accuracy") if any(line.get(key) for line in lines))
    plot(histories, metric=metric, axes=figure.add_subplot()).set_xlabel("bytes sent, both ways")


def front(found: Runs, figure: Any) -> None:
    """Accuracy against the bytes of both ways: names at the lines, a band over the seeds, and the front marked.

    A run is on the front where none that cost no more was more accurate in the mean of its last ten evaluations.
    """
    axes = figure.add_subplot()
    ink = "#7a7a7a"  # legible on white and on black
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    ends: list[tuple[float, float, str, Any]] = []
    for name, runs in found.items():
        curves = [[(p.num_bytes, 100 * p.value) for p in curve(run.history)] for run in runs]
        points = list(zip(*curves, strict=False))
        sizes = [statistics.fmean(size for size, _ in at) for at in points]
        values = [[value for _, value in at] for at in points]
        (line,) = axes.plot(sizes, [statistics.fmean(several) for several in values], linewidth=1.2)
        if len(runs) > 1:
            low, high = ([bound(several) for several in values] for bound in (min, max))
            axes.fill_between(sizes, low, high, color=line.get_color(), alpha=0.2, lw=0)
        last = statistics.fmean(value for run in runs if (value := last_evaluations(run)) is not None)
        ends.append((sizes[-1], last, name, line.get_color()))
    best = [end for end in ends if not any(x <= end[0] and y > end[1] for x, y, *_ in ends)]
    axes.plot(*zip(*sorted((x, y) for x, y, *_ in best), strict=True), "--", color=ink, linewidth=1, zorder=0)
    bottom, top = axes.get_ylim()
    at = bottom
    for end in sorted(ends, key=lambda end: end[1]):
        x, y, name, color = end
        at = max(y, at + (top - bottom) / 28)  # names do not lie on each other
        axes.plot([x], [y], "o", color=color, markersize=6 if end in best else 3)
        axes.annotate(name, (x, y), (1.01, at), textcoords=axes.get_yaxis_transform(), va="center", color=color)
    axes.set_xscale("log")
    axes.set_xlabel("bytes both ways", color=ink)
    axes.set_ylabel("accuracy, %", color=ink)
    axes.tick_params(which="both", colors=ink)
    for side in axes.spines.values():
        side.set_color(ink)
    axes.grid(alpha=0.25, color=ink)
