"""Many runs at a time: a process of one thread for each, as many as there are cores.

A trial that fails costs nobody else's work. A trial that has come to its end is not repeated, and one that was cut
short goes on from its checkpoint, so that the same call after a crash finishes what is left.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from laconic.core import LaconicError, RunError
from laconic.engine import Each, Observer, Record, Silent
from laconic.engine.files import cannot_write
from laconic.engine.processes import Child, end, fork, interrupt, settle
from laconic.experiment import Experiment
from laconic.report import read_run
from laconic.tensorboard import TensorBoard

TICK = 0.25  # seconds between two looks at what is shown
PATIENCE = 30.0  # seconds that a run has to write its last checkpoint
_WAIT = 10.0  # seconds that processes of a comparison that was killed have to notice it


@dataclass(frozen=True)
class Trial:
    """One run of a comparison: an entry with a seed, in a folder of its own name."""

    entry: str
    seed: int
    name: str
    build: Callable[[], Experiment]


class Watcher(Protocol):
    """Whoever watches many runs."""

    def row(self, name: str) -> Observer:
        """Who watches the run of this name."""
        ...

    def failed(self, name: str, reason: str) -> None:
        """A run came to a bad end."""
        ...

    def tick(self) -> None:
        """Time has passed."""
        ...


class Unwatched:
    """Nobody watches."""

    def row(self, name: str) -> Observer:
        """Nobody."""
        return Silent()

    def failed(self, name: str, reason: str) -> None:
        """Nothing."""

    def tick(self) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Manner:
    """How trials are run: where, whether from the beginning, and with which logs of their own."""

    out: Path
    overwrite: bool = False
    tensorboard: bool = False

    def __post_init__(self) -> None:
        if self.tensorboard:
            TensorBoard(self.out)  # a package that is missing is missed now, not by every run

    def perform(self, trial: Trial, observer: Observer) -> None:
        """Run a trial to its end, from where it stands; what is at its end already is only told."""
        experiment = trial.build()
        if not self.overwrite and experiment.finished(self.out):
            found = read_run(self.out / trial.name)
            observer.started(rounds=experiment.simulation.schedule.rounds, history=found.history)
            observer.finished(found.summary or {})
            return
        if self.tensorboard:
            observer = Each(observer, TensorBoard(self.out / trial.name / "tensorboard"))
        experiment.run(out=self.out, resume=not self.overwrite, overwrite=self.overwrite, observer=observer)


Event = Mapping[str, Any]
"""What a run tells: the words of an observer, or why it failed."""
Told = Generator[tuple[Trial | None, Event | None], None, None]
"""What runs tell, as it comes; nothing where time has passed."""


def run_trials(
    trials: Sequence[Trial],
    manner: Manner,
    *,
    processes: int,
    watcher: Watcher | None = None,
    elsewhere: Callable[[Sequence[Trial], Manner], Told] | None = None,
) -> dict[str, str]:
    """Run all trials, `processes` at a time (0: one after the other, in this process), or `elsewhere`.

    Gives the reasons of those that failed, by name. Interrupted, the runs that are going keep their last whole round.
    """
    watcher = watcher or Unwatched()
    with _claimed(manner.out):
        rows = {trial.name: watcher.row(trial.name) for trial in trials}
        if elsewhere is not None:
            told = elsewhere(trials, manner)
        else:
            told = forked(trials, manner, processes) if processes else _here(trials, manner, rows)
        failures: dict[str, str] = {}
        try:
            for trial, event in told:
                if event is not None and trial is not None:
                    _tell(rows[trial.name], event)
                    if "failed" in event:
                        failures[trial.name] = event["failed"]
                        watcher.failed(trial.name, event["failed"])
                watcher.tick()
        finally:
            told.close()
    return failures


def _tell(observer: Observer, event: Event) -> None:
    """Call an observer as the observer in the other process was called."""
    if "started" in event:
        observer.started(rounds=event["started"], history=[Record.read(line) for line in event["history"]])
    elif "advanced" in event:
        observer.advanced(Record.read(event["advanced"]))
    elif "finished" in event:
        observer.finished(event["finished"])


def _here(trials: Sequence[Trial], manner: Manner, rows: Mapping[str, Observer]) -> Told:
    for trial in trials:
        try:
            manner.perform(trial, rows[trial.name])
        except Exception as error:
            _log(manner.out, trial).write_text(traceback.format_exc(), encoding="utf-8")
            yield trial, {"failed": _reason(error, trial)}
        else:
            yield trial, None


def forked(trials: Sequence[Trial], manner: Manner, processes: int, *, alone: bool = False) -> Told:
    """Run trials in processes of their own; `alone`, these keep no socket of this one open."""
    pending = list(trials)
    seconds: dict[str, float] = {}  # how long an entry took with another seed
    going: dict[Connection, tuple[Trial, Child, float]] = {}
    last: dict[str, Event] = {}
    try:
        while pending or going:
            while pending and len(going) < processes:
                # The first seeds come in order; after that the longest goes first, so that no core is idle at the end.
                trial = max(pending, key=lambda trial: seconds.get(trial.entry, float("inf")))
                pending.remove(trial)
                child = fork(_work, trial, manner, alone, siblings=list(going), may_fork=True)
                going[child.pipe] = trial, child, time.monotonic()
            ready = wait(list(going), timeout=TICK)
            for pipe in ready:
                assert isinstance(pipe, Connection)  # noqa: S101 - nothing else was waited for
                trial, child, began = going[pipe]
                try:
                    event = last[trial.name] = json.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    del going[pipe]
                    (code,) = end([child], patience=PATIENCE)
                    if not {"finished", "failed"} & set(last.get(trial.name, {})):
                        yield trial, {"failed": f"its process ended with {_ending(code)}"}
                    elif "finished" in last[trial.name]:
                        seconds[trial.entry] = time.monotonic() - began
                else:
                    yield trial, event
            if not ready:
                yield None, None
    finally:
        end([child for _, child, _ in going.values()], patience=PATIENCE)


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {-code} ({signal.Signals(-code).name}); is there memory enough?"
    return f"code {code}"


class _Teller:
    """An observer that tells the parent."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def started(self, *, rounds: int, history: Sequence[Record]) -> None:
        self.tell(started=rounds, history=[record.line() for record in history])

    def advanced(self, record: Record) -> None:
        self.tell(advanced=record.line())

    def finished(self, summary: Mapping[str, Any]) -> None:
        self.tell(finished=dict(summary))

    def tell(self, **event: Any) -> None:
        # Where nobody is there any more, `_end_with` interrupts the run: a second interrupt would meet its last save.
        with suppress(OSError):
            self._pipe.send_bytes(json.dumps(event).encode())


def _work(pipe: Connection, inherited: list[Connection], trial: Trial, manner: Manner, alone: bool) -> None:
    """The life of a trial's process."""
    settle(inherited, alone_with=pipe if alone else None)
    signal.signal(signal.SIGTERM, interrupt)
    log = _redirected(manner.out, trial)
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
    teller = _Teller(pipe)
    try:
        manner.perform(trial, teller)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        traceback.print_exc()
        teller.tell(failed=_reason(error, trial))
        sys.exit(1)
    finally:
        sys.stderr.flush()
        if log.stat().st_size == 0:
            log.unlink()


def _end_with(pipe: Connection) -> None:
    """Wait for the parent to hang up or to die, then interrupt the run: it keeps its last whole round."""
    with suppress(EOFError, OSError):
        pipe.recv_bytes()
    os.kill(os.getpid(), signal.SIGTERM)


def _redirected(out: Path, trial: Trial) -> Path:
    """Whatever the run and a user's code print goes to a file of its own: the terminal belongs to the display."""
    log = _log(out, trial)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = os.fdopen(descriptor, "w", buffering=1, encoding="utf-8")
    return log


def _log(out: Path, trial: Trial) -> Path:
    folder = out / "logs"
    folder.mkdir(exist_ok=True)
    return folder / f"{trial.name}.log"


def _reason(error: Exception, trial: Trial) -> str:
    said = " ".join(str(error).split())
    if isinstance(error, LaconicError):
        return said
    return f"{type(error).__name__}: {said or 'no words'} (traceback in logs/{trial.name}.log)"


@contextmanager
def _claimed(out: Path) -> Iterator[None]:
    """Keep a comparison's folder to ourselves; processes of one that was killed are given the time to end."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("wb")
    except OSError as error:
        raise cannot_write(out, error) from None
    with lock:
        deadline = time.monotonic() + _WAIT
        while True:
            try:
                # Unlike a run's lock, this one is inherited: it is free when the last of our children is gone.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    raise RunError(
                        f"{out} is in use by another comparison; wait for it or choose another folder."
                    ) from None
                time.sleep(0.1)
        yield
