"""The pool: jobs go to the least busy machine, and to another one where that machine dies."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from laconic.cluster.connect import Cluster, Place, find_ray, on_node, places, require_room
from laconic.cluster.machine import Identity, Machine, Work
from laconic.config import Table, experiment_from
from laconic.core import DataError, LaconicError, RunError, UserError
from laconic.engine import Observer, Run, Simulation
from laconic.engine.processes import can_fork
from laconic.engine.workers import Job
from laconic.experiment import Experiment

log = logging.getLogger("laconic")
_AHEAD = 8  # jobs per worker that may be finished before the oldest one is: bounds what waits in memory
_TRIES = 3  # machines that may die over a job, and actors that may die on a machine without a result, before we give up
_LOOK = 2.0  # seconds between looks at who is there
_START = 30.0  # seconds that the others have to be ready when the first machine is
_ALONE = 60.0  # seconds that a cluster without any machine of ours is waited for


def on_cluster(
    run: Table | Experiment,
    cluster: Cluster,
    *,
    out: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    observer: Observer | None = None,
) -> Run:
    """Run on a cluster.

    A run that is given as plain sections (as `read_table` gives them) is made on every machine from these, and reads
    its data there. One that is given as an `Experiment` is sent, data and all, once to every machine.
    """
    experiment = run if isinstance(run, Experiment) else experiment_from(run)  # what is wrong is said before Ray starts
    simulation = experiment.simulation
    work: Work = (simulation.agreement, simulation.clients) if isinstance(run, Experiment) else run
    simulation.carrier = lambda simulation: Machines(simulation, cluster, work)
    with cluster.connected():
        return experiment.run(out=out, resume=resume, overwrite=overwrite, observer=observer)


@dataclass(frozen=True)
class _Task:
    """A job, its place among the results, and how many machines died over it."""

    number: int
    job: Job
    deaths: int = 0

    def after_death(self) -> _Task:
        """The same, to be tried again, if it has not cost too many machines."""
        if self.deaths + 1 == _TRIES:
            raise RunError(f"{_TRIES} machines or actors of the cluster died over one job; is there memory enough?")
        return replace(self, deaths=self.deaths + 1)


@dataclass(eq=False)
class _Actor:
    """An actor that we started: where, and what it is at."""

    place: Place
    handle: Any
    opening: Any = None
    """What its first call will give, until it has."""
    busy: dict[Any, _Task] = field(default_factory=dict)


class Machines:
    """A pool whose workers are on the machines of a Ray cluster.

    It looks around now and then: a machine that joins the cluster is taken in, one that is gone is left out, and an
    actor that died is started again where there is room.
    """

    def __init__(self, simulation: Simulation, cluster: Cluster, work: Work) -> None:
        self._ray = find_ray()
        self._simulation, self._cluster = simulation, cluster
        self._identity = Identity.of(simulation.agreement, simulation.clients)
        self._work = self._ray.put(work)
        self._shared: dict[str, bytes] = {}
        self._actors: list[_Actor] = []
        self._fruitless: Counter[str] = Counter()
        """How many actors died on each machine since the last result from there."""
        self._refused: set[str] = set()
        self._looked = -math.inf
        self._retries = 0
        try:
            self._gather()
        except BaseException:
            self.close()
            raise

    # --- the pool ----------------------------------------------------------------------------------------------------

    def share(self, **values: bytes) -> None:
        """Give every machine some values: each fetches them once."""
        self._shared.update(values)
        ready = self._ready()
        sent = self._ray.put(values)
        self._told({actor: actor.handle.share.remote(sent) for actor in ready})

    def map(self, jobs: Iterable[Job], *, count: int) -> Iterator[Any]:
        """Results in order. Whatever dies costs a retry elsewhere."""
        source = (_Task(number, job) for number, job in enumerate(jobs))
        todo: deque[_Task] = deque()  # drawn from the source, and not with a machine
        finished: dict[int, Any] = {}
        drawn = given = 0
        while given < count:
            ahead = _AHEAD * sum(actor.place.slots for actor in self._ready())
            while todo or drawn < min(count, given + ahead):
                if not todo:
                    todo.append(next(source))
                    drawn += 1
                actor = self._least_busy(left=count - drawn + len(todo))
                if actor is None:
                    break
                task = todo.popleft()
                actor.busy[actor.handle.run.remote(task.job)] = task
            if given in finished:
                yield finished.pop(given)
                given += 1
                continue
            finished |= self._collect(todo)

    def figures(self) -> dict[str, Any]:
        """How many jobs of the round were begun again because a machine or an actor died, if any were."""
        retries, self._retries = self._retries, 0
        return {"retries": retries} if retries else {}

    def close(self) -> None:
        """End our actors, and their workers with them."""
        for actor in self._actors:
            self._end(actor)
        self._actors = []

    # --- who is there ------------------------------------------------------------------------------------------------

    def _ready(self) -> list[_Actor]:
        return [actor for actor in self._actors if actor.opening is None]

    def _gather(self) -> None:
        """Wait for all machines that have room, or for a while once there is one."""
        require_room(self._cluster)
        first = math.inf
        while True:
            self._look()
            self._welcome(timeout=0.2, strict=True)
            now = time.monotonic()
            if self._ready():
                first = min(first, now)
                if len(self._ready()) == len(self._actors) or now - first > _START:
                    return

    def _look(self) -> None:
        """See which machines there are; start an actor wherever there is room for one and none of ours."""
        if time.monotonic() - self._looked < (_LOOK if self._actors else 0.2):
            return
        self._looked = time.monotonic()
        there = list(places(self._cluster))
        alive = {place.node for place in there}
        for actor in [actor for actor in self._actors if actor.place.node not in alive and actor.opening is not None]:
            self._drop(actor)  # one with jobs is noticed by those
        taken = {actor.place.node for actor in self._actors}
        for place in there:
            given_up = place.node in self._refused or self._fruitless[place.node] >= _TRIES
            if place.slots and place.node not in taken and not given_up:
                self._start(place)

    def _start(self, place: Place) -> None:
        """Start an actor with as many workers as there is room for, or several of one each where it cannot fork."""
        slots = min(place.slots, self._simulation.population.most)
        forks = can_fork() and self._simulation.method.task.device == "cpu"
        for each in [slots] if forks else [1] * slots:
            gpus = each * self._cluster.gpus_per_client
            handle = (
                self._ray.remote(Machine)
                .options(
                    num_cpus=each * self._cluster.cpus_per_client,
                    num_gpus=gpus if gpus < 1 else math.ceil(gpus - 1e-6),  # Ray has no fractions above one
                    max_concurrency=each,
                    max_restarts=0,
                    scheduling_strategy=on_node(place.node),
                )
                .remote()
            )
            opening = handle.open.remote(self._work, str(Path.cwd()), each)
            self._actors.append(_Actor(place._replace(slots=each), handle, opening))

    def _welcome(self, *, timeout: float, strict: bool = False) -> None:
        """Take in the actors that have opened. One that is not like us ends a run that has not begun (`strict`)."""
        waiting = {actor.opening: actor for actor in self._actors if actor.opening is not None}
        if not waiting:
            time.sleep(timeout)
            return
        for ref in self._ray.wait(list(waiting), num_returns=len(waiting), timeout=timeout)[0]:
            self._opened(waiting[ref], strict=strict)

    def _opened(self, actor: _Actor, *, strict: bool = False) -> None:
        errors = self._ray.exceptions
        name = f"the cluster's machine {actor.place.name}"
        try:
            identity = self._ray.get(actor.opening)
        except errors.RayError as error:
            if "failed to import" in str(error):  # Ray's words
                refusal: UserError = RunError(f"{name} has no laconic like this one; install the same on all.")
            elif isinstance(error, errors.RayTaskError):
                refusal = _refusal(error, name)
            else:
                self._drop(actor)
                return
        else:
            unlike = self._identity.unlike(identity)
            if not unlike:
                if identity.processor != self._identity.processor:
                    log.warning(
                        "%s computes with %s, this one with %s: results may differ in the last digits",
                        *(name, identity.processor, self._identity.processor),
                    )
                actor.opening = None
                if self._shared:
                    self._told({actor: actor.handle.share.remote(dict(self._shared))})
                return
            refusal = RunError(f"{name} {unlike}.")
        if strict:
            raise refusal
        log.warning("not taken in: %s", refusal)
        self._refused.add(actor.place.node)
        self._drop(actor)

    def _told(self, calls: dict[_Actor, Any]) -> None:
        """Wait until all have heard."""
        for actor, ref in calls.items():
            try:
                self._ray.get(ref)
            except self._ray.exceptions.RayTaskError as error:
                raise _cause(error) from None
            except self._ray.exceptions.RayError:
                self._drop(actor)

    def _drop(self, actor: _Actor) -> list[_Task]:
        """Give an actor up; gives the jobs that it had."""
        if actor in self._actors:
            log.info("an actor on %s is gone", actor.place.name)
            self._actors.remove(actor)
            self._fruitless[actor.place.node] += 1
            self._end(actor)
        tasks = sorted(actor.busy.values(), key=lambda task: task.number)
        actor.busy.clear()
        return tasks

    def _end(self, actor: _Actor) -> None:
        with suppress(Exception):  # it may be gone already, and Ray with it
            self._ray.kill(actor.handle)

    # --- jobs --------------------------------------------------------------------------------------------------------

    def _least_busy(self, *, left: int) -> _Actor | None:
        """The actor with most room. A second job may wait for each worker there, to save the way back and forth.

        Near the end, jobs go to idle workers only.
        """
        ready = self._ready()
        if not ready:
            return None
        actor = min(ready, key=lambda actor: len(actor.busy) / actor.place.slots)
        depth = 2 if left > sum(actor.place.slots for actor in ready) else 1
        return actor if len(actor.busy) < depth * actor.place.slots else None

    def _collect(self, todo: deque[_Task]) -> dict[int, Any]:
        """Wait for something; gives the results that have come. Jobs of the dead go back to `todo`."""
        if not self._ready():
            self._wait_for_anybody()
            return {}
        came: dict[int, Any] = {}
        owners = {ref: actor for actor in self._actors for ref in actor.busy}
        refs = [*owners, *(actor.opening for actor in self._actors if actor.opening is not None)]
        found, _ = self._ray.wait(refs, num_returns=1, timeout=_LOOK)
        if len(refs) > 1 and found:
            found, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in found:
            if (actor := owners.get(ref)) is None:
                self._opened(next(actor for actor in self._actors if actor.opening == ref))
            elif ref in actor.busy:
                lost = self._result(actor, ref, came)
                self._retries += len(lost)
                todo.extendleft(task.after_death() for task in reversed(lost))
        self._look()
        return came

    def _result(self, actor: _Actor, ref: Any, came: dict[int, Any]) -> list[_Task]:
        """Take in a result; gives the jobs that were lost instead."""
        errors = self._ray.exceptions
        try:
            result = self._ray.get(ref)
        except errors.RayTaskError as error:
            raise _cause(error) from None
        except errors.RayActorError:
            return self._drop(actor)
        except errors.RayError:  # the result was made, and lost with the machine that held it
            return [actor.busy.pop(ref)]
        came[actor.busy.pop(ref).number] = result
        self._fruitless[actor.place.node] = 0
        return []

    def _wait_for_anybody(self) -> None:
        ends = time.monotonic() + _ALONE
        while not self._ready():
            self._look()
            self._welcome(timeout=0.2)
            if not self._actors and time.monotonic() > ends:
                raise RunError("no machine of the cluster is left for this run; go on with it when there is one.")


def _cause(error: Any) -> Exception:
    """What a call raised there, as if it had been here."""
    cause = error.cause
    return cause if isinstance(cause, LaconicError) else RuntimeError(f"on a machine of the cluster: {error}")


def _refusal(error: Any, name: str) -> UserError:
    """Why a machine could not make the run, in one sentence."""
    cause = error.cause
    said = " ".join(str(cause).split()).rstrip(".")
    if isinstance(cause, DataError):
        return DataError(f"{name} has no such data: {said}.")
    if isinstance(cause, UserError):
        return type(cause)(f"{name} cannot make this run: {said}.")
    return RunError(f"{name} cannot make this run: {type(cause).__name__}: {said}.")
