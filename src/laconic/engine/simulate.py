"""A run, round by round: cohorts, frames, folding, evaluations.

What carries jobs to clients is a `Pool`: worker processes in the embedded engine (many clients on one machine, every
frame real), nodes on other machines in `laconic.flower`.

Every key derives from (seed, round, client) and replies are folded in client order, so the result is the same, bit for
bit, for any number of workers and any order of arrival.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch

from laconic.core import (
    Bound,
    ClientInfo,
    ConfigError,
    Goal,
    Key,
    Method,
    PayloadError,
    Population,
    Reply,
    Task,
    TooFewReplies,
    Tree,
    one_of,
    printable,
    traits_of,
)
from laconic.engine.bounds import UNBOUNDED, Bounds, within
from laconic.engine.downlink import Downlink, Memories
from laconic.engine.ledger import Ledger
from laconic.engine.record import Record, Rejection
from laconic.engine.round import Agreement, Link, Score, open_reply, said, send, server_round, to_everyone
from laconic.engine.store import ClientStore, Kind, Store, pack
from laconic.engine.way_down import ToAll, ToEach, WayDown
from laconic.engine.workers import LOST, Anew, Clients, Done, Failure, Pool, Train, open_pool

BETWEEN_ROUNDS = -1
"""`State.round` while a round is being kept: such a state is not a whole one."""


@dataclass
class State:
    """All that a run is after so many rounds; what a checkpoint holds."""

    round: int
    server: Tree
    personal: Store = field(default_factory=ClientStore)
    codec: Store = field(default_factory=ClientStore)
    local: dict[int, Score] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    downlink: Downlink | None = None
    """What clients hold of the way down, where one tree stands for all."""
    memories: Memories | None = None
    """What clients hold of the way down, where each holds a tree of its own."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long and how wide a run is: `min_replies` fewer accepted replies abandon a round, and the state stays."""

    rounds: int = 30
    cohort: int = 10
    eval_every: int = 5
    min_replies: int = 1

    def __post_init__(self) -> None:
        for name in ("rounds", "cohort", "eval_every", "min_replies"):
            if getattr(self, name) < 1:
                raise ConfigError(f"run.{name} must be at least 1, got {getattr(self, name)}.")
        if self.min_replies > self.cohort:
            raise ConfigError(f"run.min_replies ({self.min_replies}) is larger than run.cohort ({self.cohort}).")


Metrics = dict[str, Any]
"""What an evaluation finds, by name."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """When a run ends before its last round.

    At an evaluation whose `metric` is at least `target` (at most, where `lower`); after `patience` evaluations in a row
    that were no better than the best before them; in the round in which `bytes` are spent, both ways together.
    """

    metric: str = "global_accuracy"
    target: float | None = None
    patience: int | None = None
    bytes: float | None = None
    lower: bool = False

    def __post_init__(self) -> None:
        for name, given in (("patience", self.patience), ("bytes", self.bytes)):
            if given is not None and not given >= 1:
                raise ConfigError(f"stop.{name} must be at least 1, got {given}.")
        if self.target is self.patience is self.bytes is None:
            raise ConfigError("stop needs a target, patience or bytes: { target = 0.9 }, say.")

    def why(self, evaluated: Sequence[Metrics], spent: int) -> str | None:
        """Why a run that found this and cost so much is over; `None` while it goes on."""
        if self.bytes is not None and spent >= self.bytes:
            return "bytes"
        if evaluated and (self.target is not None or self.patience is not None):
            if self.metric not in evaluated[-1]:
                raise ConfigError(f"stop.metric: no evaluation finds {self.metric!r}; {_known(evaluated[-1])}.")
            values = [found[self.metric] * (-1 if self.lower else 1) for found in evaluated]
            if self.target is not None and values[-1] >= self.target * (-1 if self.lower else 1):
                return "target"
            if self.patience is not None and len(values) > self.patience:
                best = values.index(max(values))
                return "patience" if len(values) - 1 - best >= self.patience else None
        return None


def _known(found: Metrics) -> str:
    return f"they find {', '.join(name for name in found if isinstance(found[name], float))}"


class Evaluation(Protocol):
    """Something that a run measures.

    It may have more: `check(task, clients)` refuses what cannot be measured before a run begins, and `fitted = True`
    asks for scores of the models that clients have just fitted, where they have none of their own.
    """

    @property
    def at_end(self) -> bool:
        """Whether once, at the end of a run, or every `eval_every` rounds."""
        ...

    def metrics(self, run: Simulation, pool: Pool, found: Mapping[str, Any]) -> Metrics:
        """What it finds, by names of its own; `found` is what the evaluations before it found."""
        ...


class Simulation:
    """A run, round by round. Iterate to advance; `state` is where it stands."""

    def __init__(
        self,
        method: Method,
        task: Task,
        clients: Clients,
        link: Link,
        schedule: Schedule,
        *,
        seed: int,
        evaluations: Sequence[Evaluation] = (),
        workers: int | Literal["auto"] = "auto",
        store: Kind = "memory",
        bounds: Bounds = UNBOUNDED,
        stop: Stop | None = None,
    ) -> None:
        if workers != "auto" and workers < 0:
            raise ConfigError(f"run.workers must be 'auto' or not negative, got {workers}.")
        one_of("run.store", store, get_args(Kind))
        self.schedule, self.clients, self.seed = schedule, clients, seed
        self.evaluations, self.workers, self.store, self.bounds = tuple(evaluations), workers, store, bounds
        self.stop = stop
        self.evaluated: list[Metrics] = []
        self.population = Population(clients.num_clients, schedule.cohort, clients.newcomer)
        self.carrier: Carrier = worker_pool
        self.anew: Anew | None = None
        self.secret_draws = False
        """Whether clients have keys of their own where the method wants it; a simulation has all from its seed."""
        bound = method.bind(task, self.population)
        self.agreement = Agreement(bound, link, Key.from_seed(seed), method.name, method.settings)
        self.state = State(0, bound.init(self.agreement.key.fold_in("init")))
        # What does not go together is said before any worker starts.
        self.agreement.check_draws(self.state.server)
        memory = self.agreement.memory_for(self.population)
        if bound.replica is not None and schedule.cohort != clients.num_clients:
            raise ConfigError(
                f"{method.name}: its clients hold replicas of one model, so all of them take part in every round; "
                f"set run.cohort to {clients.num_clients} (got {schedule.cohort}), or local_steps to more than 1."
            )
        for evaluation in self.evaluations:
            if (check := getattr(evaluation, "check", None)) is not None:
                check(task, clients)
        goal = self._goal()
        if goal is not None and "accuracy" not in task.metrics:
            raise ConfigError(f"{method.name}: its goal is an accuracy, but this task has no metric of that name.")
        if goal is not None and goal.on == "validation" and not len(clients.validation):
            raise ConfigError(
                f"{method.name}: its goal is evaluated on validation data, but none is held out; "
                "set run.validation (to 0.1, say), or goal_on = 'test', as the published code does."
            )
        if not bound.per_client:
            everyone = to_everyone(0)
            first = (
                self.agreement.first_held() if bound.replica else self.agreement.broadcast(self.state.server, everyone)
            )
            link.up.init_state(bound.message_spec(first))
        if self.agreement.remembers and task.initial is not None and not traits_of(link.down).keeps_weights:
            warnings.warn(
                f"link.down = {link.down.text!r} is made for changes, but first weights were given: clients hold them "
                "only after some contacts. With eden or int8 they do after the first.",
                RuntimeWarning,
                stacklevel=2,
            )
        if memory == "shared":
            from_key = self.agreement.remembers or task.initial is None
            self.state.downlink = Downlink(self.agreement.first_held(), from_key=from_key)
        elif memory == "client":
            self.state.memories = Memories(link.memory)

    @property
    def method(self) -> Bound:
        """The method, bound to the task."""
        return self.agreement.method

    def __iter__(self) -> Iterator[Record]:
        """Advance to the last round, giving each round's record."""
        with one_thread():
            pool = self.carrier(self)
            try:
                while self.state.round < self.schedule.rounds and self.stopped is None:
                    yield self._round(pool)
            finally:
                pool.close()

    def _round(self, pool: Pool) -> Record:
        began = time.perf_counter()
        number = self.state.round + 1
        exchange = _Exchange(self, pool, number)
        server, abandoned = exchange.run()
        self._keep(exchange, number, None if abandoned else server)
        last = number == self.schedule.rounds or self.stopped is not None
        evaluation = self._evaluate(pool, at_end=last) if last or number % self.schedule.eval_every == 0 else {}
        if evaluation:
            self.evaluated.append(evaluation)
            if not last and self.stopped is not None and any(one.at_end for one in self.evaluations):
                evaluation |= self._evaluate(pool, at_end=True)
        evaluation |= self._end_phase(evaluation)
        return Record(
            number,
            {**exchange.traffic(), **pool.figures()},
            exchange.means(),
            evaluation,
            tuple(exchange.rejections),
            abandoned,
            time.perf_counter() - began,
        )

    @property
    def stopped(self) -> str | None:
        """Why the run is over before its last round, if it is."""
        if self.stop is None:
            return None
        return self.stop.why(self.evaluated, self.state.ledger.bytes_up + self.state.ledger.bytes_down)

    def _keep(self, exchange: _Exchange, number: int, server: Tree | None) -> None:
        """Make a round part of the state. Until `round` is set again, an interrupted state is not a whole one."""
        state = self.state
        state.round = BETWEEN_ROUNDS
        exchange.keep(accepted=server is not None)
        if server is not None:
            state.server = server
        for client in sorted(exchange.lost):
            state.server = self.method.forget(state.server, client)
        state.round = number

    def _evaluate(self, pool: Pool, *, at_end: bool) -> dict[str, Any]:
        """What the state says of itself, and what the evaluations of a run find."""
        self._share_models(pool)
        found: dict[str, Any] = dict(self.method.metrics(self.state.server))
        if self.method.secret_draws:
            found["privacy_simulated"] = int(not self.secret_draws)
        for evaluation in sorted(self.evaluations, key=lambda one: one.at_end):
            if at_end or not evaluation.at_end:
                found |= evaluation.metrics(self, pool, found)
        return found

    def _share_models(self, pool: Pool) -> None:
        """Give the workers what they predict with: the server's state, and what clients hold of it."""
        pool.share(server=pack(self.state.server))
        if self.method.own_model and not self.method.per_client:
            pool.share(newest=pack(self._newest()))

    def _newest(self) -> Tree:
        """What clients have of the newest broadcast, as the way down makes it; evaluating costs nothing on the wire.

        Where each holds a tree of its own there is no such thing: they get the broadcast as it is.
        """
        state, everyone = self.state, to_everyone(self.state.round)
        if self.method.replica is not None and state.downlink is not None:
            return state.downlink.held
        if state.memories is not None:
            return self.agreement.broadcast(state.server, everyone)
        return send(self.agreement, state.server, everyone, None if state.downlink is None else state.downlink.held)[
            1
        ].received

    def _end_phase(self, evaluation: Mapping[str, Any]) -> dict[str, int]:
        """Go on to the method's next phase where an evaluation says that its goal is reached."""
        goal, phases = self._goal(), self.method.phases
        if goal is None or phases is None or not evaluation:
            return {}
        if goal.metric not in evaluation:
            raise ConfigError(f"the method's goal is {goal.metric}, which no evaluation finds; add Global().")
        if evaluation[goal.metric] < goal.accuracy:
            return {}
        self.state.server = phases.advance(self.state.server)
        return {"goal_round": self.state.round}

    def _goal(self) -> Goal | None:
        return None if self.method.phases is None else self.method.phases.goal(self.state.server)

    def with_models(self) -> Sequence[int]:
        """The clients that have a model of their own: all, or those that took part once."""
        if self.method.own_part is not None:
            return range(self.clients.num_clients)
        return list(self.state.personal)


Carrier = Callable[[Simulation], Pool]
"""What opens the pool of a run."""


def worker_pool(simulation: Simulation) -> Pool:
    """The embedded engine's pool: worker processes, or none."""
    return open_pool(
        simulation.agreement,
        simulation.clients,
        workers=simulation.workers,
        most=simulation.population.most,
        anew=simulation.anew,
    )


class _Kept(NamedTuple):
    """What a client keeps if the round counts: handles of its stores, and its score."""

    client: int
    personal: Any
    codec: Any
    local: Score | None


class _Exchange:
    """One round's messages: out, back, decoded, folded. Nothing of it touches the state before `keep`."""

    def __init__(self, simulation: Simulation, pool: Pool, round: int) -> None:
        self._simulation, self._pool, self._round = simulation, pool, round
        self._cohort = simulation.population.cohort_of(simulation.agreement.round_key(round), round=round)
        self._down: WayDown
        self.ledger = Ledger()
        self.replies = 0
        self.rejections: list[Rejection] = []
        self._metrics: dict[str, list[float]] = {}
        self._came: dict[int, Done] = {}
        self._done: list[_Kept] = []
        self._unheard: set[int] = set()
        self.lost: set[int] = set()

    @property
    def size(self) -> int:
        """How many clients take part."""
        return len(self._cohort)

    def run(self) -> tuple[Tree, str]:
        """The server's new state, or the reason why the round is abandoned."""
        simulation = self._simulation
        server = simulation.state.server
        stream = self._counted(self._stream())
        first = next(stream, None)
        if first is None:
            return server, "no reply was accepted"
        short = ""
        try:
            new = server_round(simulation.agreement, server, itertools.chain([first], stream), self._round)
        except TooFewReplies as error:
            new, short = server, str(error)
        for _ in stream:  # a method that stopped early must not leave local updates in the pipes
            pass
        needed = min(simulation.schedule.min_replies, self.size)
        if short or self.replies < needed:
            return server, short or f"{self.replies} replies accepted, {needed} needed"
        if not _finite(new):
            return server, "the server's state would not be finite"
        return new, ""

    def traffic(self) -> dict[str, float]:
        """Who took part, and the bytes of their frames."""
        return {
            "cohort": self.size,
            "replies": self.replies,
            "rejected": len(self.rejections),
            "bytes_up": self.ledger.bytes_up,
            "bytes_down": self.ledger.bytes_down,
            **self._down.figures(),
        }

    def means(self) -> dict[str, float]:
        """What the accepted clients said of their training (the loss and so on), averaged."""
        numbers = {name: [v for v in values if math.isfinite(v)] for name, values in self._metrics.items()}
        return {name: sum(values) / len(values) if values else math.nan for name, values in numbers.items()}

    def keep(self, *, accepted: bool) -> None:
        """What was sent was sent; what clients keep counts only if the round does. The refused keep what they had."""
        state = self._simulation.state
        state.ledger += self.ledger
        self._down.keep(self._cohort, self._unheard)
        for client in self.lost:
            for store in (state.personal, state.codec):
                store.pop(client, None)
            for memory in (state.downlink, state.memories):
                if memory is not None:
                    memory.forget(client)
        for done in self._done:
            for store, staged in ((state.personal, done.personal), (state.codec, done.codec)):
                if accepted:
                    store.keep(done.client, staged)
                else:
                    store.discard(staged)
            if accepted and done.local is not None:
                state.local[done.client] = done.local

    def _counted(self, replies: Iterator[Reply]) -> Iterator[Reply]:
        """Those that count, within the bounds of the run."""
        simulation = self._simulation
        method = simulation.method
        for reply in within(replies, simulation.bounds, method.task.spec, self._refuse):
            result = self._came.pop(reply.client.id)
            self.ledger.paper_bytes += method.paper_bytes(reply.received, reply.message)
            self.replies += 1
            self._done.append(self._staged(reply.client.id, result))
            for name, value in said(simulation.agreement, result.metrics).items():
                self._metrics.setdefault(name, []).append(value)
            yield reply

    def _refuse(self, client: ClientInfo, reason: str, detail: str) -> None:
        """What came and does not count after all."""
        del self._came[client.id]
        self._reject(client, reason, detail)

    def _stream(self) -> Iterator[Reply]:
        """Honest replies in client order, as they come."""
        simulation, state = self._simulation, self._simulation.state
        agreement, method = simulation.agreement, simulation.method
        infos = [ClientInfo(client, self._round, 0) for client in self._cohort]
        evaluates = not method.own_model and any(getattr(one, "fitted", False) for one in simulation.evaluations)
        if method.per_client or state.memories is not None:
            self._down = ToEach(agreement, state, self._pool, self._round)
        else:
            self._down = ToAll(agreement, state, self._pool, self._round, self._cohort)
        jobs = (
            Train(
                info,
                state.personal.get(info.id, b""),
                state.codec.get(info.id, b""),
                self._down.held(info.id),
                evaluates,
            )
            for info in infos
        )
        for info, result in zip(infos, self._pool.map(jobs, count=len(infos)), strict=True):
            if num_bytes := self._down.sent(info, result):
                self.ledger.down(num_bytes)
            if isinstance(result, Failure):
                self._reject(info, result.reason, result.detail)
                if not result.heard:
                    self._unheard.add(info.id)
                if result.reason == LOST:
                    self.lost.add(info.id)
                continue
            self.ledger.up(len(result.frame))
            received = self._down.received(info, result)
            try:
                reply = open_reply(agreement, result.frame, received, info)
            except PayloadError as error:
                self._reject(info, error.reason, error.detail)
                continue
            self._came[info.id] = result._replace(frame=b"", held=b"")
            yield reply

    def _staged(self, client: int, done: Done) -> _Kept:
        """What the client keeps, in the stores but not yet the client's: a large cohort must not wait in memory."""
        state = self._simulation.state
        personal, codec = state.personal.stage(client, done.personal), state.codec.stage(client, done.codec_state)
        return _Kept(client, personal, codec, done.local)

    def _reject(self, client: ClientInfo, reason: str, detail: str) -> None:
        self.rejections.append(Rejection(client.id, client.round, reason, printable(detail)))


def _finite(tree: Tree) -> bool:
    leaves = [leaf for leaf in tree.values() if leaf.is_floating_point()]
    # A sum that is finite has finite terms: one pass in the usual case.
    return all(bool(leaf.sum().isfinite()) or bool(leaf.isfinite().all()) for leaf in leaves)


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread, as the workers have: sums then come out the same with and without workers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
