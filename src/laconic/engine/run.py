"""A run and the files that it leaves.

::

    <out>/<name>/config.toml        the full resolved configuration
                 metrics.jsonl      one JSON object per round
                 summary.json       the metrics of the run
                 split.json         how examples and labels are dealt to clients
                 checkpoints/       where it can be resumed
                 clients/           clients' own states, where they are kept on disk
                 tensorboard/       the metrics for TensorBoard, where they are asked for
                 model.lac          the final model in its compact form
                 model.safetensors  the weights of the final predictor
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shutil
import struct
import sys
import tomllib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

import tomli_w
import torch
from torch import nn

from laconic.core import Bound, ConfigError, RunError, Tree, tree_sha256
from laconic.data import Federation, split_of
from laconic.engine.checkpoint import Checkpoints
from laconic.engine.files import Behind, cannot_write, remove_temporaries, sync_path, write_all, write_atomically
from laconic.engine.history import frame, plot
from laconic.engine.record import Record
from laconic.engine.simulate import Simulation
from laconic.engine.store import ClientStore, DiskStore, Kind, Store, pack
from laconic.model_file import write_model
from laconic.models import artifact_of, multiply_adds, num_parameters

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LOCK = ".lock"
_FREE = {"run.workers", "run.checkpoint_every", "run.store", "deploy.deadline"}  # what does not change the result


@dataclass(frozen=True)
class Run:
    """What a run gave: `history` (a record per round), `summary`, and `model`, ready to predict.

    The records are mappings: `pandas.DataFrame(run.history)` is a table of them.
    """

    history: list[Record]
    summary: dict[str, Any]
    model: nn.Module
    directory: Path | None = None

    def plot(self, *, metric: str = "global_accuracy", axes: Axes | None = None) -> Axes:
        """Draw accuracy, or another metric of the records, against the bytes sent so far, both ways (matplotlib)."""
        return plot({self.summary["method"]: [self.history]}, metric=metric, axes=axes)

    def frame(self) -> DataFrame:
        """The records as a data frame by round, with the bytes so far in `bytes_total` (pandas)."""
        return frame(self.history)


class Observer(Protocol):
    """Whoever watches a run: a progress display, a log."""

    def started(self, *, rounds: int, history: Sequence[Record]) -> None:
        """The run begins, or goes on after the rounds of `history`."""
        ...

    def advanced(self, record: Record) -> None:
        """A round was made."""
        ...

    def finished(self, summary: Mapping[str, Any]) -> None:
        """The run ended well."""
        ...


class Silent:
    """Watches without a word."""

    def started(self, *, rounds: int, history: Sequence[Record]) -> None:
        """Nothing."""

    def advanced(self, record: Record) -> None:
        """Nothing."""

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Nothing."""


class Each:
    """Several observers, told one after the other."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def started(self, *, rounds: int, history: Sequence[Record]) -> None:
        """Tell each."""
        for observer in self._observers:
            observer.started(rounds=rounds, history=history)

    def advanced(self, record: Record) -> None:
        """Tell each."""
        for observer in self._observers:
            observer.advanced(record)

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Tell each."""
        for observer in self._observers:
            observer.finished(summary)


class RunDirectory:
    """The folder of one run, locked while it is open."""

    def __init__(self, out: Path, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                "run.name must be 1 to 100 letters, digits, '.', '_' or '-' and start with a letter or digit, "
                f"got {name!r}."
            )
        self.path = out / name
        self.checkpoints = Checkpoints(self.path / "checkpoints")
        self._lock: IO[bytes] | None = None
        self._metrics: IO[bytes] | None = None

    def open(self, config: Mapping[str, Any], *, resume: bool, overwrite: bool = False) -> int | None:
        """Lock the folder and make it ready; refuse a folder in use, or one that holds another run.

        Where a run that had come to its end is given more rounds: how many it had.
        """
        try:
            return self._open(config, resume=resume, overwrite=overwrite)
        except OSError as error:
            self.close()
            raise cannot_write(self.path, error) from None
        except BaseException:
            self.close()
            raise

    def _open(self, config: Mapping[str, Any], *, resume: bool, overwrite: bool) -> int | None:
        if self.path.is_symlink():
            raise RunError(f"{self.path} is a link to another folder; remove it or choose another run.name.")
        self.checkpoints.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / _LOCK).open("wb")
        try:
            # A POSIX lock: not inherited by forked workers, gone with the process however it ends.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(
                f"{self.path} is in use by another process; wait for it or choose another run.name."
            ) from None
        _held.add((os.getpid(), self.path.resolve()))
        written, ended = self.path / "config.toml", None
        if written.exists() and overwrite:
            shutil.rmtree(self.checkpoints.folder)
            self.checkpoints.folder.mkdir()
            for folder in (self.checkpoints.clients, self.path / "tensorboard"):
                shutil.rmtree(folder, ignore_errors=True)
            for stale in (
                *("metrics.jsonl", "summary.json", "split.json", "model.lac", "model.safetensors", "report.html"),
                "config.toml",
            ):
                (self.path / stale).unlink(missing_ok=True)
        elif written.exists():
            if not resume:
                raise RunError(
                    f"{self.path} already holds a run; go on with --resume, start over with --overwrite, "
                    "or choose another run.name."
                )
            before = self._check_same(config, written)
            if before < _rounds(config) and (self.path / "summary.json").exists():
                ended = before
                for stale in ("summary.json", "model.lac", "model.safetensors", "report.html"):
                    (self.path / stale).unlink(missing_ok=True)
        remove_temporaries(self.path)
        write_atomically(written, tomli_w.dumps(without_none(config)).encode())
        return ended

    def finished(self, config: Mapping[str, Any]) -> bool:
        """Whether this very run stands here and has come to its end; another run in its place is refused."""
        written = self.path / "config.toml"
        if not written.exists():
            return False
        return self._check_same(config, written) == _rounds(config) and (self.path / "summary.json").exists()

    def _check_same(self, config: Mapping[str, Any], written: Path) -> int:
        """The rounds that the run was given before: it may be given more, but nothing else may be another."""
        try:
            old = tomllib.loads(written.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise RunError(f"cannot resume {self.path}: its config.toml cannot be read ({error}).") from None
        for key, was, now in changes(old, config):
            if key == "run.rounds" and isinstance(was, int) and was < now:
                continue
            raise RunError(
                f"cannot resume {self.path}: {key} was {was!r} and is {now!r} now; "
                "restore it, or choose another run.name."
            )
        return _rounds(old)

    def read_history(self, *, num_bytes: int) -> list[Record]:
        """The records up to a checkpoint; later lines are cut off, for their rounds are made again."""
        path = self.path / "metrics.jsonl"
        try:
            data = path.read_bytes() if path.exists() else b""
            if len(data) < num_bytes:
                raise RunError(
                    f"{path} is shorter than its checkpoint says ({len(data)} of {num_bytes} bytes); "
                    "start over with --overwrite."
                )
            if len(data) > num_bytes:
                os.truncate(path, num_bytes)
        except OSError as error:
            raise cannot_write(path, error) from None
        try:
            return [Record.read(json.loads(line)) for line in data[:num_bytes].splitlines()]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise RunError(f"{path} is damaged ({error}); start over with --overwrite.") from None

    def append(self, record: Record) -> int:
        """Append a record at once; gives the length of the file."""
        path = self.path / "metrics.jsonl"
        try:
            if self._metrics is None:
                self._metrics = path.open("ab", buffering=0)
                sync_path(self.path)
            write_all(self._metrics, json.dumps(record.line(), allow_nan=False).encode() + b"\n")
            return self._metrics.tell()
        except OSError as error:
            raise cannot_write(path, error) from None

    def sync(self) -> None:
        """Make the records durable before a checkpoint relies on them."""
        if self._metrics is not None:
            try:
                os.fsync(self._metrics.fileno())
            except OSError as error:
                raise cannot_write(self.path / "metrics.jsonl", error) from None

    def write(self, name: str, data: bytes) -> None:
        """Write a file of the run, whole or not at all."""
        write_atomically(self.path / name, data)

    def close(self) -> None:
        """Release the folder."""
        for file in (self._metrics, self._lock):
            if file is not None:
                file.close()
        self._metrics = self._lock = None
        _held.discard((os.getpid(), self.path.resolve()))


def _rounds(config: Mapping[str, Any]) -> int:
    """How many rounds a configuration asks for; of one that says nothing of it, none."""
    return int(config.get("run", {}).get("rounds", 0))


_held: set[tuple[int, Path]] = set()
"""The folders that this process has locked: it must not open their locks, for closing one would release it."""


def in_use(folder: Path) -> bool:
    """Whether a process is at the run in a folder: asks who holds its lock, and takes none itself."""
    if (os.getpid(), folder.resolve()) in _held:
        return True
    # struct flock, as the system lays it out: type, whence, start, length, process.
    linux = sys.platform.startswith("linux")
    asked = (
        struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0) if linux else struct.pack("qqihh", 0, 0, 0, fcntl.F_WRLCK, 0)
    )
    try:
        # Without waiting, whatever somebody has put in the lock's place.
        handle = os.open(folder / _LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        answer = fcntl.fcntl(handle, fcntl.F_GETLK, asked)
    except OSError:
        return False
    finally:
        os.close(handle)
    kind = struct.unpack("hhqqi4x", answer)[0] if linux else struct.unpack("qqihh", answer)[3]
    return bool(kind != fcntl.F_UNLCK)


def execute(
    simulation: Simulation,
    config: Mapping[str, Any],
    *,
    facts: Mapping[str, Any],
    directory: RunDirectory | None = None,
    resume: bool = False,
    overwrite: bool = False,
    checkpoint_every: int = 10,
    observer: Observer | None = None,
) -> Run:
    """Run to the end, leaving files where a directory is given; interrupted, it can be resumed."""
    observer = observer or Silent()
    if resume and overwrite:
        raise ConfigError("resume goes on with a run and overwrite starts it over: choose one.")
    if directory is None:
        if resume or overwrite:
            raise ConfigError("resume and overwrite are about a run's folder: say where it is with out.")
        _place_states(simulation, None)
        return _to_the_end(simulation, facts, None, [], 0, checkpoint_every, observer)
    ended = directory.open(config, resume=resume, overwrite=overwrite)
    try:
        if ended is not None and (
            ended % simulation.schedule.eval_every or any(e.at_end for e in simulation.evaluations)
        ):
            # The last round was evaluated as a last round is. In a longer run it is none, so it is made again.
            directory.checkpoints.forget(ended)
        if isinstance(simulation.clients, Federation):
            directory.write("split.json", json.dumps(split_of(simulation.clients)).encode() + b"\n")
        history: list[Record] = []
        num_bytes = 0
        found = directory.checkpoints.load() if resume else None
        if found is not None:
            simulation.state, notes = found
            num_bytes = notes["metrics_bytes"]
        _place_states(simulation, directory.checkpoints.clients)
        history = directory.read_history(num_bytes=num_bytes)
        return _to_the_end(simulation, facts, directory, history, num_bytes, checkpoint_every, observer)
    finally:
        directory.close()


def _place_states(simulation: Simulation, folder: Path | None) -> None:
    """Let clients' states lie where the run wants them, and what they hold of the way down."""
    state = simulation.state
    state.personal = _placed(state.personal, "personal", simulation.store, folder)
    state.codec = _placed(state.codec, "codec", simulation.store, folder)
    if state.memories is not None:
        state.memories.store = _placed(state.memories.store, "memory", simulation.store, folder)


def _placed(store: Store, kind: str, where: Kind, folder: Path | None) -> Store:
    if (where == "disk") == isinstance(store, DiskStore):
        return store
    moved = DiskStore(None if folder is None else folder / kind) if where == "disk" else ClientStore()
    moved.update(store)
    return moved


def _to_the_end(
    simulation: Simulation,
    facts: Mapping[str, Any],
    directory: RunDirectory | None,
    history: list[Record],
    num_bytes: int,
    checkpoint_every: int,
    observer: Observer,
) -> Run:
    simulation.evaluated = [dict(record.evaluation) for record in history if record.evaluation]
    saved = simulation.state.round if directory is not None and history else -1
    behind = Behind()

    def written() -> None:
        """Until the checkpoint that was begun is written."""
        if behind.wait() and directory is not None:
            directory.checkpoints.tidy(simulation.state)

    def checkpoint() -> None:
        nonlocal saved
        if directory is not None and saved != simulation.state.round:
            write = directory.checkpoints.taken(simulation.state, {"metrics_bytes": num_bytes})
            behind.start(directory.sync, write)
            saved = simulation.state.round

    observer.started(rounds=simulation.schedule.rounds, history=history)
    checkpoint()
    written()  # before workers are forked, which are better off without other threads
    done = simulation.state.round
    try:
        # Closed at once, whatever happens in the loop: an error's traceback would keep the workers waiting.
        with closing(cast(Generator[Record], iter(simulation))) as records:
            for record in records:
                if directory is not None:
                    num_bytes = directory.append(record)
                history.append(record)
                done = record.round
                written()  # a checkpoint is durable one round later at the latest
                if record.round % checkpoint_every == 0:
                    checkpoint()
                observer.advanced(record)
    except KeyboardInterrupt:
        # A round that is cut short leaves the state alone until it is kept; one cut while it is being kept does not
        # count, and the checkpoint before serves.
        if simulation.state.round == done:
            checkpoint()
        written()
        raise
    finally:
        behind.close()
    checkpoint()
    written()
    if all(record.abandoned for record in history):
        raise RunError(
            f"every one of the {len(history)} rounds was abandoned, so nothing was learnt; the last one because "
            f"{history[-1].abandoned}{_why(history[-1])}."
        )
    method, server = simulation.method, simulation.state.server
    model = method.global_model(server)
    compact = _compact(method, server)
    summary = _summary(simulation, {**facts, **_sizes(simulation, model, compact)}, history)
    if directory is not None:
        if compact is not None:
            directory.write("model.lac", compact)
        directory.write("model.safetensors", pack(model.state_dict()))
        directory.write("summary.json", json.dumps(summary, indent=2, allow_nan=False).encode() + b"\n")
    observer.finished(summary)
    return Run(history, summary, model, directory.path if directory is not None else None)


def _compact(method: Bound, server: Tree) -> bytes | None:
    """The model's file; none where only the method itself can make the model, or where training diverged."""
    artifact, architecture = artifact_of(method, server), method.task.architecture
    if artifact is None or architecture is None:
        return None
    whole = all(bool(leaf.isfinite().all()) for leaf in artifact.tree.values())
    return write_model(artifact, architecture, method.task.spec) if whole else None


def _sizes(simulation: Simulation, model: nn.Module, compact: bytes | None) -> dict[str, int]:
    """What the final model costs to store and to run, beside the whole architecture."""
    task = simulation.method.task
    own = simulation.clients.client(0).train
    # On a server whose clients' data lie elsewhere, the common test set has to do.
    x, _ = next(iter((own if len(own) else simulation.clients.test).batches(1)))
    whole = task.fresh()
    return {
        "final_parameters": num_parameters(model),
        "final_nonzero": sum(int(leaf.count_nonzero()) for leaf in model.parameters()),
        **({"model_bytes": len(compact)} if compact is not None else {}),
        "multiply_adds": multiply_adds(model, x),
        "multiply_adds_whole": multiply_adds(whole, x),
    }


def _summary(simulation: Simulation, facts: Mapping[str, Any], history: list[Record]) -> dict[str, Any]:
    state, method = simulation.state, simulation.method
    parameters = sum(p.numel() for p in method.task.module.parameters())
    bits_up, bits_down = state.ledger.bits_per_parameter(parameters)
    found: dict[str, Any] = next((record.line()["evaluation"] for record in reversed(history) if record.evaluation), {})
    return {
        "method": simulation.agreement.name,
        **facts,
        "parameters": parameters,
        "rounds": state.round,
        "clients": simulation.clients.num_clients,
        "cohort": simulation.schedule.cohort,
        "seed": simulation.seed,
        "up": simulation.agreement.link.up.text,
        "down": simulation.agreement.link.down.text,
        "global_accuracy": None,
        "local_accuracy": None,
        **{
            name: record.evaluation[name] for record in history for name in ("goal_round",) if name in record.evaluation
        },
        **found,
        **method.metrics(state.server),
        "bytes_up": state.ledger.bytes_up,
        "bytes_down": state.ledger.bytes_down,
        "bits_per_parameter_up": bits_up,
        "bits_per_parameter_down": bits_down,
        "paper_bytes": state.ledger.paper_bytes,
        "rejected": sum(record.traffic["rejected"] for record in history),
        **_rest(history),
        **({"stopped": simulation.stopped} if simulation.stopped else {}),
        "abandoned": sum(bool(record.abandoned) for record in history),
        "seconds": sum(record.seconds for record in history),
        "state_sha256": tree_sha256(state.server),
        "versions": versions(),
    }


def _why(record: Record) -> str:
    """The first reason why replies of a round were refused."""
    if not record.rejections:
        return ""
    first = record.rejections[0]
    return f" (client {first.client}: {first.reason}, {first.detail})"


def _rest(history: list[Record]) -> dict[str, Any]:
    """Why replies were refused, where some were; and the sums of what only a carrier over a network counts."""
    reasons: dict[str, int] = {}
    for record in history:
        for rejection in record.rejections:
            reasons[rejection.reason] = reasons.get(rejection.reason, 0) + 1
    sums = {
        name: sum(record.traffic.get(name, 0) for record in history)
        for name in ("transport_bytes_up", "transport_bytes_down", "evaluation_bytes_down", "late")
        if any(name in record.traffic for record in history)
    }
    return {**({"rejected_for": dict(sorted(reasons.items()))} if reasons else {}), **sums}


def versions() -> dict[str, str]:
    """What the figures were made with."""
    return {
        "laconic": version("laconic"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "constriction": version("constriction"),
        "platform": f"{sys.platform}-{platform.machine()}",
    }


def without_none(value: Any) -> Any:
    """A configuration as TOML can have it: what is None is left out, at any depth."""
    if isinstance(value, Mapping):
        return {str(key): without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_none(item) for item in value]
    return value


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The settings in which two configurations differ, but for those that do not change the result.

    >>> list(changes({"run": {"seed": 1, "workers": 2}}, {"run": {"seed": 3, "workers": 4}}))
    [('run.seed', 1, 3)]
    """
    before, after = _flattened(without_none(old)), _flattened(without_none(new))
    for key in sorted({*before, *after} - _FREE):
        if before.get(key) != after.get(key):
            yield key, before.get(key), after.get(key)


def _flattened(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        path = f"{prefix}{key}"
        flat.update(_flattened(value, f"{path}.") if isinstance(value, Mapping) else {path: value})
    return flat
