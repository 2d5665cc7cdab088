"""Several methods under equal conditions, with several seeds: their runs, and what they say together."""

from __future__ import annotations

import hashlib
import inspect
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from laconic.cluster import Cluster
from laconic.comparison.result import Comparison, Outcome
from laconic.comparison.spread import spread
from laconic.comparison.table import Target
from laconic.comparison.trials import Manner, Told, Trial, Watcher, run_trials
from laconic.config import Table, experiment_from
from laconic.core import ConfigError, Method, did_you_mean
from laconic.data import Federation
from laconic.engine.processes import can_fork
from laconic.engine.workers import InProcess, cores
from laconic.experiment import MOVED, Experiment, RunSettings, checked_method, experiment, fit, run_settings
from laconic.progress import Board
from laconic.report import RunRecord, read_run

Seeds = int | Sequence[int]
"""So many seeds from 0, or the seeds themselves."""
Processes = int | Literal["auto"]


Conditions = Mapping[str, Any]
"""What `fit` may be told about a run, but for its data, its seed and its files."""
_OWN = ("data", "out", "resume", "overwrite", "observer", "seed", "name", "workers", "run")


def compare(
    methods: Mapping[str, Method | str | Conditions] | Iterable[Method | str],
    *,
    data: Federation | Callable[[int], Federation],
    seeds: Seeds = 3,
    target: float | str | None = None,
    out: Path | str | None = None,
    processes: Processes = "auto",
    overwrite: bool = False,
    tensorboard: bool = False,
    progress: bool = True,
    **conditions: Any,
) -> Comparison:
    """Run several methods under equal conditions with several seeds, as many at a time as there are cores.

    An entry is a method, or conditions that it does not share with the others. With `out`, runs leave their files there
    beside the tables and report.html, and the same call goes on where an earlier one ended. `data` may be a function of
    the seed.

    >>> import laconic as lc
    >>> found = lc.compare(
    ...     {"fedavg": lc.fedavg(), "2 bits": {"method": lc.fedavg(), "up": "eden:bits=2"}},
    ...     data=lc.data.digits(clients=10), seeds=2, rounds=2, cohort=3, progress=False,
    ... )
    >>> [(row["name"], row["runs"], row["bytes_up"] < row["bytes_down"]) for row in found.table]
    [('fedavg', 2, False), ('2 bits', 2, True)]
    """
    entries = {name: _varied(conditions, entry) for name, entry in _named(methods).items()}
    numbers = _numbers(seeds)
    wanted = _processes(
        processes, len(entries) * len(numbers), devices={e.get("device", "cpu") for e in entries.values()}
    )
    trials = [
        Trial(
            name, seed, folder, _lenient(processes, partial(_experiment, data, seed, folder, _workers(wanted), **entry))
        )
        for (name, entry), seed, folder in _places(entries, numbers)
    ]
    with _folder(out) as folder:
        manner = Manner(folder, overwrite, tensorboard)
        found = _compared(trials, manner, processes=wanted, target=target, progress=progress)
        if out is None:
            return replace(found, folder=None)
        found.report(Path(out) / "report.html")
    return found


def compare_tables(
    tables: Iterable[tuple[str, Table]],
    *,
    out: Path | str,
    seeds: Seeds = 3,
    target: float | str | None = None,
    processes: Processes = "auto",
    overwrite: bool = False,
    tensorboard: bool = False,
    progress: bool = True,
    cluster: Cluster | None = None,
) -> Comparison:
    """Run named configurations (as `read_table` gives them) with several seeds; `outcomes` say where the runs lie.

    The same call again goes on where this one ended: finished runs stay, others are resumed. With a `cluster`, runs are
    spread over its machines, which have to share the folder `out`.
    """
    if cluster is not None and processes != "auto":
        raise ConfigError("compare: processes are for this machine; on a cluster, say what a client takes.")
    named = list(tables)
    _unique(name for name, _ in named)
    entries, numbers = dict(named), _numbers(seeds)
    devices = {str(table["run"].get("device", "cpu")) for table in entries.values()}
    wanted = _processes(processes, len(entries) * len(numbers), devices=devices)
    workers = _workers(wanted) if cluster is None else 0

    def with_seed(table: Table, seed: int, folder: str) -> Experiment:
        run = {**table["run"], "name": folder, "seed": seed, "workers": workers}
        return experiment_from({**table, "run": run})

    trials = [
        Trial(name, seed, folder, _lenient(processes, partial(with_seed, table, seed, folder)))
        for (name, table), seed, folder in _places(entries, numbers)
    ]
    manner = Manner(Path(out), overwrite, tensorboard)
    elsewhere = None if cluster is None else partial(spread, cluster=cluster)
    return _compared(trials, manner, processes=wanted, target=target, progress=progress, elsewhere=elsewhere)


def _compared(
    trials: Sequence[Trial],
    manner: Manner,
    *,
    processes: int,
    target: float | str | None,
    progress: bool,
    elsewhere: Callable[[Sequence[Trial], Manner], Told] | None = None,
) -> Comparison:
    aim = None if target is None else Target.parse(target)
    _check(trials, manner)
    with _board(progress) as board:
        failures = run_trials(trials, manner, processes=processes, watcher=board, elsewhere=elsewhere)
    outcomes = tuple(
        Outcome(trial.entry, trial.seed, manner.out / trial.name, failures.get(trial.name)) for trial in trials
    )
    runs: dict[str, list[RunRecord]] = {trial.entry: [] for trial in trials}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.seed):
        if outcome.failure is None:
            runs[outcome.entry].append(read_run(outcome.path))
    comparison = Comparison(outcomes, runs, aim, manner.out)
    comparison.write(manner.out)
    return comparison


def _check(trials: Sequence[Trial], manner: Manner) -> None:
    """Say what is wrong with an entry before any run starts; so too where its folder holds another run."""
    seen = set()
    for trial in trials:
        if trial.entry not in seen:
            seen.add(trial.entry)
            made = trial.build()
            if not manner.overwrite:
                made.finished(manner.out)


@contextmanager
def _board(progress: bool) -> Iterator[Watcher | None]:
    if not progress:
        yield None
        return
    board = Board(Console(stderr=True))
    try:
        yield board
    finally:
        board.close()


@contextmanager
def _folder(out: Path | str | None) -> Iterator[Path]:
    """Where runs leave their files; for a while only, where nobody wants them."""
    if out is not None:
        yield Path(out)
        return
    with tempfile.TemporaryDirectory(prefix="laconic-") as folder:
        yield Path(folder)


def _named(methods: Mapping[str, Method | str | Conditions] | Iterable[Method | str]) -> dict[str, Any]:
    if not isinstance(methods, Mapping):
        methods = list(methods)
        names = [method if isinstance(method, str) else checked_method(method).name for method in methods]
        _unique(names)
        methods = dict(zip(names, methods, strict=True))
    if not methods:
        raise ConfigError("compare: there is nothing to compare; give at least one method.")
    return dict(methods)


def _unique(names: Iterable[str]) -> None:
    for name, times in Counter(names).items():
        if times > 1:
            raise ConfigError(f"compare: {times} entries are called {name!r}; give each a name of its own.")


def _varied(conditions: Conditions, entry: Method | str | Conditions) -> Conditions:
    own = entry if isinstance(entry, Mapping) else {"method": entry}
    parts = [name for name, p in inspect.signature(fit).parameters.items() if p.kind is p.KEYWORD_ONLY]
    known = [name for name in (*parts, *(field.name for field in fields(RunSettings))) if name not in _OWN]
    for key in (*conditions, *own):
        if key in MOVED:
            raise ConfigError(f"compare: {key} is no more; {MOVED[key]}.")
        if key not in known:
            raise ConfigError(f"compare: unknown condition {key!r}; {did_you_mean(key, known)}")
    return {**conditions, **own}


def _experiment(
    data: Federation | Callable[[int], Federation], seed: int, name: str, workers: int, **conditions: Any
) -> Experiment:
    settings = {field.name: conditions.pop(field.name) for field in fields(RunSettings) if field.name in conditions}
    run = run_settings({**settings, "seed": seed, "name": name, "workers": workers}, where="compare")
    return experiment(data=data(seed) if callable(data) else data, run=run, **conditions)


def _numbers(seeds: Seeds) -> tuple[int, ...]:
    """The seeds, each once.

    >>> _numbers(3), _numbers([7, 4])
    ((0, 1, 2), (7, 4))
    """
    numbers = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise ConfigError(
            f"compare: seeds are a number of them, or different ones that are not negative, got {seeds!r}."
        )
    return numbers


def _processes(processes: Processes, runs: int, *, devices: set[str]) -> int:
    """How many runs at a time: none in processes of their own where they cannot be forked."""
    forks = can_fork() and devices <= {"cpu"}
    if processes == "auto":
        return min(cores(), runs) if forks else 0
    if processes < 0 or (processes and not forks):
        raise ConfigError(
            f"compare: processes must be 'auto', 0 (no process but this one) or, on a system with fork and the CPU, "
            f"more; got {processes}."
        )
    return min(processes, runs)


def _lenient(processes: Processes, build: Callable[[], Experiment]) -> Callable[[], Experiment]:
    """A run without workers of its own whose clients' exceptions cost their replies, as they do with workers.

    Else what a comparison gives would depend on the number of cores. `processes = 0` is for debugging, and ends a run.
    """

    def built() -> Experiment:
        made = build()
        if processes != 0 and made.simulation.workers == 0:
            made.simulation.carrier = lambda simulation: InProcess(simulation.agreement, simulation.clients)
        return made

    return built


def _workers(processes: int) -> int:
    """A run's own workers: none, but where there are more cores than runs."""
    spare = cores() // max(1, processes)
    return spare if processes and spare > 1 else 0


def _places(entries: Mapping[str, Any], seeds: Sequence[int]) -> Iterator[tuple[tuple[str, Any], int, str]]:
    """Every entry with every seed, and its folder's name. First seeds first: so every entry is soon seen."""
    short = {name: re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-._")[:80] or "run" for name in entries}
    times = Counter(short.values())
    for seed in seeds:
        for name, entry in entries.items():
            # Names that differ in what a folder cannot be called are told apart by their hashes.
            again = times[short[name]] > 1
            mark = f"-{hashlib.sha256(name.encode()).hexdigest()[:6]}" if again else ""
            yield (name, entry), seed, f"{short[name]}{mark}-s{seed}"
