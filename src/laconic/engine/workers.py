"""Where local updates are computed: in this process, or in worker processes of one torch thread each.

Both run the same jobs at a `Station`, and both give results in the order of the jobs, so that nothing else in laconic
knows the difference. Worker processes are forked: they share the data with the parent, and a user's own classes need
no pickling. For devices other than the CPU they are spawned, and each makes the run anew from its settings.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import torch

from laconic.core import (
    ClientData,
    ClientInfo,
    ConfigError,
    LaconicError,
    Newcomer,
    Part,
    PayloadError,
    RunError,
    Tree,
)
from laconic.engine.processes import Child, can_fork, end, fork, settle, spawn
from laconic.engine.round import Agreement, Held, Score, chunks, client_round, evaluate, receive, send_tree, to_everyone
from laconic.engine.store import pack, unpack

_AHEAD = 8  # jobs per worker that may be finished before the oldest one is: bounds what waits in memory
_TRIES = 3  # workers that may die over a job before we give up
_DETAIL = 500  # characters of a client's error that a record keeps
_PATIENCE = 2.0  # seconds that workers have to end by themselves


class Clients(Protocol):
    """What the engine needs of a federation."""

    @property
    def num_clients(self) -> int:
        """How many clients there are."""
        ...

    @property
    def test(self) -> Part:
        """The common test set."""
        ...

    @property
    def validation(self) -> Part:
        """Examples to decide by, if there are any."""
        ...

    @property
    def newcomer(self) -> Newcomer | None:
        """How the last client joins later, if it does."""
        ...

    def client(self, client: int) -> ClientData:
        """One client's data."""
        ...


class Failure(NamedTuple):
    """A job that gave nothing, and why."""

    reason: str
    detail: str
    down: int | None = None
    """Bytes that went down for it, where the carrier knows; 0 if nothing was sent at all."""
    heard: bool = True
    """Whether the client is known to have got what was sent."""
    held: bytes = b""
    """What it then holds, where it was sent a frame of its own."""


LOST = "state_lost"
"""The reason of a client that no longer holds what it should: it starts over, and is sent a full snapshot."""


class Done(NamedTuple):
    """A client's local update, packed for the way to the parent.

    The states are the client's new ones, or whatever stands for them where clients keep their states themselves: the
    engine gives back, at the client's next local update, what came with the last one that counted.
    """

    frame: bytes
    personal: bytes
    codec_state: bytes
    local: Score | None
    metrics: dict[str, float]
    seconds: float
    down: int | None = None
    """Bytes that went down for it, where the carrier knows."""
    held: bytes = b""
    """What the client holds now, where it was sent a frame of its own."""


@dataclass
class Station:
    """What a job has at hand: the agreement, the data, and what the parent shares for this round."""

    agreement: Agreement
    clients: Clients
    shared: dict[str, bytes] = field(default_factory=dict)
    held: Tree | None = None
    """What clients held before this round's frame, where this station has seen the frame before."""
    strict: bool = False
    """Whether a client's own exception ends the run: for debugging."""

    def share(self, values: dict[str, bytes]) -> None:
        """Take in what the parent shares; what was derived from older values is forgotten."""
        if "held" in values:
            self.held = None
        elif "frame" in values and self.agreement.builds_on_held:
            self.held = self.common.held
        self.shared.update(values)
        for name in ("common", "server", "predictor", "_broadcast"):
            self.__dict__.pop(name, None)

    @cached_property
    def common(self) -> Held:
        """What all clients have after this round's frame: decoded once, however many clients train here."""
        held = self.held
        if held is None and self.agreement.builds_on_held:
            held = unpack(self.shared["held"])
        everyone = to_everyone(int.from_bytes(self.shared["round"], "little"))
        return receive(self.agreement, self.shared["frame"], everyone, held)

    def sent(self, client: ClientInfo, held: bytes) -> tuple[bytes, Held]:
        """A frame for this client alone, and what it has after it: the server's part of the work, done here."""
        agreement = self.agreement
        tree = agreement.broadcast(self.server, client) if agreement.method.per_client else self._broadcast
        before = (unpack(held) or self.first_held) if agreement.remembers else None
        return send_tree(agreement, tree, client, before)

    @cached_property
    def _broadcast(self) -> Tree:
        return unpack(self.shared["broadcast"])

    @cached_property
    def first_held(self) -> Tree:
        """What everybody holds before the first contact."""
        return self.agreement.first_held()

    @cached_property
    def server(self) -> Tree:
        """The server's state, for evaluations."""
        return unpack(self.shared["server"])

    @cached_property
    def predictor(self) -> torch.nn.Module:
        """What the server predicts with."""
        return self.agreement.method.global_model(self.server)

    def local_model(self, client: ClientInfo, personal: bytes) -> torch.nn.Module:
        """What a client predicts with, from the newest broadcast; at first, from its first state."""
        method = self.agreement.method
        newest = self.shared.get("newest")  # what clients have of the newest broadcast, where they share one
        received = self.agreement.broadcast(self.server, client) if newest is None else unpack(newest)
        if method.local_model is None:
            raise ConfigError("this method does not say what a client predicts with: give it a local_model.")
        return method.local_model(received, unpack(personal) or self.first_personal(client))

    def model_of(self, client: ClientInfo, personal: bytes | None) -> torch.nn.Module:
        """What a client predicts with, or without `personal` the server."""
        return self.predictor if personal is None else self.local_model(client, personal)

    def first_personal(self, client: ClientInfo) -> Tree:
        """A client's personal state before its first local update."""
        return self.agreement.method.init_client(self.agreement.key.fold_in("init_client", client.id))

    @cached_property
    def test_chunks(self) -> list[Part]:
        """The common test set in pieces."""
        return chunks(self.clients.test)

    @cached_property
    def validation_chunks(self) -> list[Part]:
        """What is held out to decide by, in pieces."""
        return chunks(self.clients.validation)


class Job(Protocol):
    """Something to compute at a station."""

    @property
    def small(self) -> bool:
        """Whether it can wait in a pipe without filling it."""
        ...

    @property
    def once(self) -> bool:
        """Whether it is lost with the worker that ran it (a local update), or begun again with another one."""
        ...

    def run(self, station: Station) -> Any:
        """The result."""
        ...


@dataclass(frozen=True)
class Train:
    """A client's local update. `held` is what it holds, where it is sent a frame of its own."""

    client: ClientInfo
    personal: bytes = b""
    codec_state: bytes = b""
    held: bytes | None = None
    evaluate: bool = True
    once = True

    @property
    def small(self) -> bool:
        """Jobs without state are a few bytes."""
        return not (self.personal or self.codec_state or self.held)

    def run(self, station: Station) -> Done | Failure:
        """The local update; whatever goes wrong in it costs this client's reply and nothing else.

        At a station that is `strict`, a client's own exception is let through, with a note that says where it was.
        """
        agreement, down, held = station.agreement, None, b""
        try:
            if self.held is None:
                received = station.common.received
            else:
                frame, has = station.sent(self.client, self.held)
                received, held, down = has.received, pack(has.held), len(frame)
            data = station.clients.client(self.client.id)
            if not len(data.train):
                return Failure("no_data", "the client has no examples to train on", down, held=held)
            personal = unpack(self.personal) or station.first_personal(self.client)
            state = unpack(self.codec_state) or agreement.link.up.init_state(agreement.method.message_spec(received))
            update = client_round(agreement, received, self.client, personal, state, data, evaluates=self.evaluate)
        except PayloadError as error:
            return Failure(error.reason, error.detail, down, held=held)
        except (ConfigError, KeyboardInterrupt):  # a mistake in the settings would meet every client
            raise
        except BaseException as error:  # a panic of native code and sys.exit() are no Exceptions, and no better
            if station.strict and isinstance(error, Exception):
                error.add_note(f"(client {self.client.id}, round {self.client.round}, in {_stage(error)})")
                raise
            said = " ".join(str(error).split())[:_DETAIL]
            return Failure("client_error", f"{type(error).__name__}: {said}", down, held=held)
        return Done(
            update.frame,
            pack(update.personal),
            pack(update.codec_state),
            update.local,
            dict(update.metrics),
            update.seconds,
            down,
            held,
        )


@dataclass(frozen=True)
class EvaluateServer:
    """The server's predictor on one piece of the common test set, or of what is held out to decide by."""

    chunk: int
    held_out: bool = False
    small = True
    once = False

    def run(self, station: Station) -> Score:
        """Its score."""
        pieces = station.validation_chunks if self.held_out else station.test_chunks
        return evaluate(station.agreement.method.task, station.predictor, pieces[self.chunk])


@dataclass(frozen=True)
class EvaluateClient:
    """A client's own predictor (the server's, without `personal`) on its own test data."""

    client: ClientInfo
    personal: bytes | None
    small = False
    once = False

    def run(self, station: Station) -> Score:
        """Its score."""
        part = station.clients.client(self.client.id).test
        return evaluate(station.agreement.method.task, station.model_of(self.client, self.personal), part)


class Pool(Protocol):
    """Carries jobs to where they are computed and gives their results in order: the seam between engines."""

    def share(self, **values: bytes) -> None:
        """Give every station some values."""
        ...

    def map(self, jobs: Iterable[Job], *, count: int) -> Iterator[Any]:
        """Results in the order of the jobs, as they come; a `Failure` for a job that gave none."""
        ...

    def figures(self) -> dict[str, Any]:
        """What the carrier itself has to say of the round that ends, for its record."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...


Anew = Callable[[], tuple[Agreement, Clients]]
"""What makes the parts of a run once more, in another process: it can be pickled."""


def open_pool(
    agreement: Agreement, clients: Clients, *, workers: int | Literal["auto"], most: int, anew: Anew | None = None
) -> Pool:
    """A pool of worker processes (`most` at the most), or of none (`workers = 0`, for debugging: see `InProcess`).

    `auto` is one per core where processes can be forked, else none. Where they can't, or must not (accelerators),
    processes are spawned and take `anew`.
    """
    forks = can_fork() and agreement.method.task.device == "cpu"
    wanted = (cores() if forks else 0) if workers == "auto" else workers
    if wanted and not forks and anew is None:
        raise ConfigError(
            f"workers = {wanted} needs a system with fork and device = 'cpu', or a run from a configuration file, "
            "which every worker makes anew; set workers = 0."
        )
    wanted = min(wanted, most)
    if wanted:
        return Processes(agreement, clients, wanted, anew=None if forks else anew)
    return InProcess(agreement, clients, strict=workers == 0)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class InProcess:
    """No workers: jobs run here, one after the other, when their result is asked for. For debugging and devices.

    Where `strict`, a client's own exception ends the run.
    """

    def __init__(self, agreement: Agreement, clients: Clients, *, strict: bool = False) -> None:
        self.station = Station(agreement, clients, strict=strict)

    def share(self, **values: bytes) -> None:
        """Give the station some values."""
        self.station.share(values)

    def map(self, jobs: Iterable[Job], *, count: int) -> Iterator[Any]:
        """Results in order."""
        for job in jobs:
            yield job.run(self.station)

    def figures(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """Nothing to end."""


class Processes:
    """Worker processes: forked, or with `anew` spawned.

    `alone`, they keep no socket of this process open, whoever it may lead to.
    """

    def __init__(
        self, agreement: Agreement, clients: Clients, workers: int, *, alone: bool = False, anew: Anew | None = None
    ) -> None:
        self._agreement, self._clients, self._alone, self._anew = agreement, clients, alone, anew
        self._shared: dict[str, bytes] = {}
        self._workers: list[Child] = []
        for _ in range(workers):
            self._workers.append(self._start())

    def _start(self) -> Child:
        if self._anew is not None:
            return spawn(_serve_anew, self._anew, dict(self._shared))
        station = Station(self._agreement, self._clients, dict(self._shared))
        return fork(_serve, station, self._alone, siblings=[worker.pipe for worker in self._workers])

    def share(self, **values: bytes) -> None:
        """Give every worker some values."""
        # What clients held before a frame is what a station that saw the frame before has itself: every worker but
        # those that are still to be forked.
        news = {name: value for name, value in values.items() if name != "held" or name not in self._shared}
        self._shared.update(values)
        packed = pickle.dumps(("share", news), protocol=5)
        for place, worker in enumerate(self._workers):
            try:
                worker.pipe.send_bytes(packed)
            except OSError:
                self._replace(place)

    def map(self, jobs: Iterable[Job], *, count: int) -> Iterator[Any]:
        """Results in order. A worker that dies costs the local update that it was at; all else is done again."""
        source = (_Task(number, job) for number, job in enumerate(jobs))
        todo: deque[_Task] = deque()  # drawn from the source, and not with a worker
        busy: dict[int, deque[_Task]] = {place: deque() for place in range(len(self._workers))}
        finished: dict[int, Any] = {}
        drawn = given = 0
        while given < count:
            while todo or drawn < min(count, given + _AHEAD * len(self._workers)):
                if not todo:
                    todo.append(next(source))
                    drawn += 1
                place = self._place_for(todo[0].job, busy, left=count - drawn + len(todo))
                if place is None:
                    break
                if self._send(place, todo[0].job):
                    busy[place].append(todo.popleft())
                elif busy[place]:
                    break  # it has died, but its last words are still to be read
                else:
                    self._replace(place)
            if given in finished:
                yield finished.pop(given)
                given += 1
                continue
            for place in self._ready(busy):
                try:
                    result = pickle.loads(self._workers[place].pipe.recv_bytes())  # noqa: S301 - our own worker's bytes
                except (EOFError, OSError):
                    code = self._replace(place)
                    task, *rest = busy[place]
                    busy[place].clear()
                    todo.extendleft(reversed(rest))
                    if task.job.once:
                        finished[task.number] = Failure("worker_died", f"its worker process ended with code {code}")
                    else:
                        todo.appendleft(task.after_death(code))
                    continue
                if isinstance(result, _Raised):
                    raise result.error
                finished[busy[place].popleft().number] = result

    def _place_for(self, job: Job, busy: dict[int, deque[_Task]], *, left: int) -> int | None:
        """The least busy worker that may take another job.

        A second job may wait in a worker's pipe, to save the way back and forth, but only a small one: a large one
        would block us while the worker is blocked on a result for us. Near the end, jobs go to idle workers only.
        """
        place = min(busy, key=lambda p: len(busy[p]))
        depth = 2 if job.small and left > len(busy) else 1
        return place if len(busy[place]) < depth else None

    def _send(self, place: int, job: Job) -> bool:
        try:
            self._workers[place].pipe.send_bytes(pickle.dumps(("run", job), protocol=5))
        except OSError:
            return False
        return True

    def _ready(self, busy: dict[int, deque[_Task]]) -> list[int]:
        """The workers that have something to say, or have died."""
        places = {self._workers[place].pipe: place for place, tasks in busy.items() if tasks}
        return [places[pipe] for pipe in multiprocessing.connection.wait(list(places))]  # type: ignore[index]

    def _replace(self, place: int) -> int | None:
        old = self._workers[place]
        (code,) = end([old], patience=_PATIENCE)
        self._workers[place] = self._start()
        return code

    def figures(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """End the workers."""
        end(self._workers, patience=_PATIENCE)
        self._workers = []


@dataclass(frozen=True)
class _Task:
    """A job, its place among the results, and how many workers died over it."""

    number: int
    job: Job
    deaths: int = 0

    def after_death(self, code: int | None) -> _Task:
        """The same, to be tried again, if it has not cost too many workers."""
        if self.deaths + 1 == _TRIES:
            raise RunError(
                f"{_TRIES} worker processes died over one job (the last with code {code}); "
                "is there memory enough? workers = 0 runs without them."
            )
        return replace(self, deaths=self.deaths + 1)


def _stage(error: BaseException) -> str:
    """The part of the round that an exception came from. A method's own functions may be called anything."""
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if "client_round" in names:
        inside = names[names.index("client_round") + 1 :][:1]
        return inside[0] if inside and inside[0] in ("evaluate", "message_spec", "encode") else "client_update"
    stages = {
        "receive": "receive",
        "sent": "broadcast",
        "first_personal": "init_client",
        "init_state": "encode",
        "client": "its data",
    }
    return next((stages[name] for name in names if name in stages), "its data")


class _Raised(NamedTuple):
    """An error of ours (not of a client) that a worker met."""

    error: Exception


def _serve(
    pipe: multiprocessing.connection.Connection,
    inherited: list[multiprocessing.connection.Connection],
    station: Station,
    alone: bool,
) -> None:
    """A forked worker's life."""
    settle(inherited, alone_with=pipe if alone else None)
    _take_jobs(pipe, station)


def _serve_anew(
    pipe: multiprocessing.connection.Connection,
    inherited: list[multiprocessing.connection.Connection],
    anew: Anew,
    shared: dict[str, bytes],
) -> None:
    """A spawned worker's life; where the run cannot be made here, every job is answered with the reason."""
    settle(inherited)
    try:
        station: Station | _Raised = Station(*anew(), shared)
    except Exception as error:
        station = _raised(error)
    _take_jobs(pipe, station)


def _raised(error: Exception) -> _Raised:
    return _Raised(error if isinstance(error, LaconicError) else RuntimeError(repr(error)))


def _take_jobs(pipe: multiprocessing.connection.Connection, station: Station | _Raised) -> None:
    """Until the parent hangs up."""
    with suppress(EOFError, OSError):
        while True:
            kind, value = pickle.loads(pipe.recv_bytes())  # noqa: S301 - our own parent's bytes
            if kind == "share":
                if isinstance(station, Station):
                    station.share(value)
                continue
            try:
                result: Any = value.run(station) if isinstance(station, Station) else station
            except Exception as error:
                result = _raised(error)
            pipe.send_bytes(pickle.dumps(result, protocol=5))
