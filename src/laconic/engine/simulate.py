"""A run, round by round: cohorts, frames, folding, judging.

What carries jobs to clients is a `Pool`: worker processes in the embedded engine (many clients on one machine, every
frame real), nodes on other machines in `laconic.flower`.

Every key derives from (seed, round, client) and replies are folded in client order, so the result is the same, bit for
bit, for any number of workers and any order of arrival.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import torch

from laconic.core import (
    ClientInfo,
    Codec,
    ConfigError,
    Ensembled,
    Goal,
    Key,
    Method,
    PayloadError,
    Phased,
    Reply,
    Task,
    Tree,
    flat,
    prepared,
)
from laconic.data import QUANTILES
from laconic.engine.cohort import Newcomer, sample_cohort
from laconic.engine.downlink import Downlink
from laconic.engine.history import Record
from laconic.engine.ledger import Ledger
from laconic.engine.round import Agreement, Link, Score, chunks, open_reply, send, server_round, to_everyone
from laconic.engine.store import ClientStore, Kind, Store, pack, unpack
from laconic.engine.workers import (
    LOST,
    Clients,
    Done,
    Failure,
    JudgeClient,
    JudgeServer,
    JudgeServerAt,
    Outputs,
    Pool,
    Predict,
    Probe,
    Train,
    open_pool,
)

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of a function among a method's settings: not the same everywhere
BETWEEN_ROUNDS = -1
"""`State.round` while a round is being kept: such a state is not a whole one."""


class Rejection(NamedTuple):
    """A reply that was not counted, and why."""

    client: int
    round: int
    reason: str
    detail: str


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


@flat
@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long and how wide a run is.

    `min_replies` fewer accepted replies abandon a round: the state stays as it was. `local_eval` judges every client's
    model on the client's own test data when it is trained.

    `store` says where clients' own states lie: in memory, or on disk where they are too large for it. `new_test` judges
    the ensemble of all clients' models on the common test set at the end. `newcomer` lets the last client join late.
    `probe` names a layer: at the end a fresh adversary is fitted to its outputs, client by client.
    """

    rounds: int = 30
    cohort: int = 10
    eval_every: int = 5
    min_replies: int = 1
    local_eval: bool = True
    workers: int | Literal["auto"] = "auto"
    store: Kind = "memory"
    new_test: bool = False
    newcomer: Newcomer | None = None
    probe: str | None = None

    def __post_init__(self) -> None:
        for name in ("rounds", "cohort", "eval_every", "min_replies"):
            if getattr(self, name) < 1:
                raise ConfigError(f"run.{name} must be at least 1, got {getattr(self, name)}.")
        if self.min_replies > self.cohort:
            raise ConfigError(f"run.min_replies ({self.min_replies}) is larger than run.cohort ({self.cohort}).")
        if self.workers != "auto" and self.workers < 0:
            raise ConfigError(f"run.workers must be 'auto' or not negative, got {self.workers}.")
        if self.store not in get_args(Kind):
            raise ConfigError(f"run.store must be 'memory' or 'disk', got {self.store!r}.")

    @property
    def most(self) -> int:
        """The largest cohort."""
        return self.cohort if self.newcomer is None else max(self.cohort, self.newcomer.others + 1)

    def cohort_of(self, key: Key, *, round: int, clients: int) -> list[int]:
        """Who takes part in a round."""
        if self.newcomer is None:
            return sample_cohort(key, clients=clients, cohort=self.cohort)
        return self.newcomer.cohort(key, round=round, clients=clients, cohort=self.cohort)


class Simulation:
    """A run, round by round. Iterate to advance; `state` is where it stands."""

    def __init__(
        self, method: Method, task: Task, clients: Clients, link: Link, schedule: Schedule, *, seed: int
    ) -> None:
        old = clients.num_clients - (schedule.newcomer is not None)
        if schedule.cohort > old:
            raise ConfigError(
                f"run.cohort is {schedule.cohort}, but there are only {old} clients; "
                "lower run.cohort or raise data.clients."
            )
        if schedule.newcomer is not None and schedule.newcomer.others > old:
            raise ConfigError(f"run.newcomer.others is {schedule.newcomer.others}, but there are only {old} others.")
        self.schedule, self.clients, self.seed = schedule, clients, seed
        self.carrier: Carrier = worker_pool
        settings = settings_text(method)
        bound = prepared(method.bind(task), clients=clients.num_clients, cohort=schedule.cohort)
        self.agreement = Agreement(bound, link, Key.from_seed(seed), settings=settings)
        self.state = State(0, self.agreement.method.init(self.agreement.key.fold_in("init")))
        # What does not go together is said before any worker starts.
        self.agreement.check_downlink()
        if self.agreement.lockstep is not None and schedule.cohort != clients.num_clients:
            raise ConfigError(
                f"{self.method.name}: its clients march in step, so all of them take part in every round; "
                f"set run.cohort to {clients.num_clients} (got {schedule.cohort}), or local_steps to more than 1."
            )
        goal = self._goal()
        if goal is not None and "accuracy" not in task.metrics:
            raise ConfigError(f"{self.method.name}: its goal is an accuracy, but this task has no metric of that name.")
        if goal is not None and goal.on == "validation" and not len(clients.validation):
            raise ConfigError(
                f"{self.method.name}: its goal is judged on validation data, but none is held out; "
                "set run.validation (to 0.1, say), or goal_on = 'test', as the published code does."
            )
        if not self.method.per_client:
            first = self.agreement.first_known()
            link.up.init_state(self.method.message_spec(first))
            if self.agreement.builds_on_known:
                self.state.downlink = Downlink(first, from_key=task.initial is None)

    @property
    def method(self) -> Method:
        """The method, bound to the task."""
        return self.agreement.method

    def __iter__(self) -> Iterator[Record]:
        """Advance to the last round, giving each round's record."""
        with one_thread():
            pool = self.carrier(self)
            try:
                while self.state.round < self.schedule.rounds:
                    yield self._advance(pool)
            finally:
                pool.close()

    def _advance(self, pool: Pool) -> Record:
        began = time.perf_counter()
        number = self.state.round + 1
        exchange = _Exchange(self, pool, number)
        server, abandoned = exchange.run()
        record: Record = {
            "round": number,
            "cohort": exchange.size,
            "replies": exchange.replies,
            "rejected": len(exchange.rejections),
            "bytes_up": exchange.ledger.bytes_up,
            "bytes_down": exchange.ledger.bytes_down,
            **exchange.means(),
        }
        if exchange.rejections:
            record["rejections"] = [rejection._asdict() for rejection in exchange.rejections]
        if abandoned:
            record["abandoned"] = abandoned
        self._keep(exchange, number, None if abandoned else server)
        if number % self.schedule.eval_every == 0 or number == self.schedule.rounds:
            record.update(self._judge(pool))
        if number == self.schedule.rounds:
            record.update(self._judge_finally(pool, record))
        self._end_phase(record)
        record.update(pool.figures())
        record["seconds"] = time.perf_counter() - began
        return record

    def _end_phase(self, record: Record) -> None:
        """Go on to the method's next phase where the evaluation says that its goal is reached."""
        goal = self._goal()
        if goal is not None and record.get(goal.figure, 0.0) >= goal.accuracy:
            self.state.server = cast(Phased, self.method).advance(self.state.server)
            record["goal_round"] = record["round"]

    def _goal(self) -> Goal | None:
        return self.method.aim(self.state.server) if isinstance(self.method, Phased) else None

    def _keep(self, exchange: _Exchange, number: int, server: Tree | None) -> None:
        """Make a round part of the state. Until `round` is set again, an interrupted state is not a whole one."""
        state = self.state
        state.round = BETWEEN_ROUNDS
        exchange.keep(accepted=server is not None)
        if server is not None:
            state.server = server
        state.round = number

    def _judge(self, pool: Pool) -> Record:
        """Global: the server's model on the common test set. Local: each client's last model on its own data."""
        state, method = self.state, self.method
        record: Record = dict(method.metrics(state.server))
        pool.share(server=pack(state.server))
        for figure, part in (("global", self.clients.test), ("validation", self.clients.validation)):
            count, held_out = len(chunks(part)), figure == "validation"
            total = Score(0, {})
            for score in pool.map((JudgeServer(i, held_out) for i in range(count)), count=count):
                total += score
            record.update({f"{figure}_{name}": value for name, value in total.means().items()})
        newcomer = None if self.schedule.newcomer is None else self.clients.num_clients - 1
        if method.stateful:
            self._share_held(pool)
        if method.stateful and self.schedule.local_eval:
            have = self._with_models()
            jobs = (JudgeClient(ClientInfo(c, state.round, 0), state.personal.get(c, b"")) for c in have)
            scores = zip(have, pool.map(jobs, count=len(have)), strict=True)
            state.local |= {c: score for c, score in scores if not isinstance(score, Failure)}
        judged = [score.means() for c, score in sorted(state.local.items()) if score.examples and c != newcomer]
        if judged:
            for name in judged[0]:
                record[f"local_{name}"] = sum(means[name] for means in judged) / len(judged)
            record.update(_distribution(judged))
        record["local_clients"] = len(judged)
        if newcomer is not None and (not method.stateful or newcomer in self._with_models()):
            at = ClientInfo(newcomer, state.round, 0)
            job = JudgeClient(at, state.personal.get(newcomer, b"")) if method.stateful else JudgeServerAt(at)
            (score,) = pool.map([job], count=1)
            record.update({f"newcomer_{name}": value for name, value in score.means().items()})
        return record

    def _with_models(self) -> Sequence[int]:
        """The clients that have a model of their own: all, or those that had a turn."""
        if isinstance(self.method, Ensembled):
            return range(self.clients.num_clients)
        return list(self.state.personal)

    def _share_held(self, pool: Pool) -> None:
        """Give the workers what clients have of the newest broadcast, where all have the same."""
        if not self.method.per_client:
            # What clients hold is what the way down makes of a broadcast; judging costs nothing on the wire.
            state, down = self.state, self.state.downlink
            held = send(self.agreement, state.server, to_everyone(state.round))[1] if down is None else down.known
            pool.share(held=pack(held))

    def _judge_finally(self, pool: Pool, record: Record) -> Record:
        """What is judged once, at the end: the ensemble of all clients' models, and what representations give away."""
        state, schedule, stateful = self.state, self.schedule, self.method.stateful
        old = self.clients.num_clients - (schedule.newcomer is not None)
        clients = [c for c in (self._with_models() if stateful else range(old)) if c < old]
        found: Record = {}
        if schedule.new_test and stateful:
            jobs = (Predict(ClientInfo(c, state.round, 0), state.personal.get(c, b"")) for c in clients)
            found.update(_ensemble(self.method.task, self.clients, pool.map(jobs, count=len(clients))))
        elif schedule.new_test:
            # Without models of their own, the ensemble of all clients' models is the server's model.
            found.update({f"new_{n.removeprefix('global_')}": v for n, v in record.items() if n.startswith("global_")})
            found["new_test_bytes_up"] = 0
        if schedule.probe is not None:
            probes = (
                Probe(ClientInfo(c, state.round, 0), schedule.probe, state.personal.get(c, b"") if stateful else None)
                for c in clients
            )
            sums: dict[str, list[float]] = {}
            for figures in pool.map(probes, count=len(clients)):
                for name, value in figures.items():
                    sums.setdefault(name, []).append(value)
            found.update({name: sum(values) / len(values) for name, values in sums.items()})
        return found


def _distribution(judged: Sequence[Mapping[str, float]]) -> Record:
    """How accuracy (the loss, where nothing else is measured) is spread over clients, the worst tenth among them."""
    name = "accuracy" if "accuracy" in judged[0] else "loss"
    if name == "loss" and len(judged[0]) > 1:
        return {}  # which end of a figure of the user's own is the bad one, only the user knows
    values = np.sort([means[name] for means in judged])
    if not np.isfinite(values).all():
        return {}
    worst = values[::-1] if name == "loss" else values
    tenth = math.ceil(len(values) / 10)
    return {
        f"local_{name}_worst_decile": float(worst[:tenth].mean()),
        **{
            f"local_{name}_p{round(100 * q)}": float(value)
            for q, value in zip(QUANTILES, np.quantile(values, QUANTILES), strict=True)
        },
    }


def _ensemble(task: Task, clients: Clients, outputs: Iterator[Outputs]) -> Record:
    """The mean of the models' outputs, and their majority vote, on the common test set."""
    total = votes = torch.zeros(())
    models = upload = 0
    for one in outputs:
        values = unpack(one.outputs)["outputs"].double()
        total, models, upload = total + values, models + 1, upload + one.upload
        if task.outputs == "logits":
            votes = votes + torch.nn.functional.one_hot(values.argmax(dim=1), values.shape[1])
    y, mean = clients.test.tensors()[1], (total / models).float()
    record: Record = {"new_loss": float(task.loss(mean, y)), "new_test_models": models, "new_test_bytes_up": upload}
    for name, metric in task.metrics.items():
        record[f"new_{name}"] = float(metric(mean, y).sum()) / len(y)
        if task.outputs == "logits":
            # Where classes have as many votes, the larger mean output decides.
            record[f"vote_{name}"] = float(metric(votes + mean.double().softmax(dim=1) / 2, y).sum()) / len(y)
    return record


Carrier = Callable[[Simulation], Pool]
"""What opens the pool of a run."""


def worker_pool(simulation: Simulation) -> Pool:
    """The embedded engine's pool: worker processes, or none."""
    schedule = simulation.schedule
    return open_pool(simulation.agreement, simulation.clients, workers=schedule.workers, most=schedule.most)


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
        key, clients = simulation.agreement.round_key(round), simulation.clients.num_clients
        self._cohort = simulation.schedule.cohort_of(key, round=round, clients=clients)
        self.ledger = Ledger()
        self.replies = 0
        self.rejections: list[Rejection] = []
        self._metrics: dict[str, list[float]] = {}
        self._done: list[_Kept] = []
        self._sent: tuple[Tree, int] | None = None
        self._costs: dict[int, int] = {}
        self._unheard: set[int] = set()
        self._lost: set[int] = set()

    @property
    def size(self) -> int:
        """How many clients take part."""
        return len(self._cohort)

    def run(self) -> tuple[Tree, str]:
        """The server's new state, or the reason why the round is abandoned."""
        simulation = self._simulation
        server = simulation.state.server
        stream = self._stream()
        first = next(stream, None)
        if first is None:
            return server, "no reply was accepted"
        new = server_round(simulation.agreement, server, itertools.chain([first], stream), self._round)
        for _ in stream:  # a method that stopped early must not leave turns in the pipes
            pass
        needed = min(simulation.schedule.min_replies, self.size)
        if self.replies < needed:
            return server, f"{self.replies} replies accepted, {needed} needed"
        if not _finite(new):
            return server, "the server's state would not be finite"
        return new, ""

    def means(self) -> Record:
        """The accepted clients' own figures (training loss and so on), averaged."""
        return {name: sum(values) / len(values) for name, values in self._metrics.items()}

    def keep(self, *, accepted: bool) -> None:
        """What was sent was sent; what clients keep counts only if the round does. The refused keep what they had."""
        state = self._simulation.state
        state.ledger += self.ledger
        if state.downlink is not None and self._sent is not None:
            state.downlink.keep(*self._sent, [client for client in self._cohort if client not in self._unheard])
        for client in self._lost:
            for store in (state.personal, state.codec):
                store.pop(client, None)
            if state.downlink is not None:
                state.downlink.forget(client)
        for done in self._done:
            for store, staged in ((state.personal, done.personal), (state.codec, done.codec)):
                if accepted:
                    store.keep(done.client, staged)
                else:
                    store.discard(staged)
            if accepted and done.local is not None:
                state.local[done.client] = done.local

    def _stream(self) -> Iterator[Reply]:
        """Accepted replies in client order, as they come."""
        simulation, state = self._simulation, self._simulation.state
        agreement = simulation.agreement
        method = agreement.method
        infos = [ClientInfo(c, self._round, 0) for c in self._cohort]
        received: dict[int, Tree] = {}
        shared = None if method.per_client else self._broadcast()

        def jobs() -> Iterator[Train]:
            for info in infos:
                own = None
                if method.per_client:
                    own, received[info.id] = send(agreement, state.server, info)
                    self._costs[info.id] = len(own)
                yield Train(
                    info,
                    state.personal.get(info.id, b""),
                    state.codec.get(info.id, b""),
                    own,
                    simulation.schedule.local_eval and not method.stateful,
                )

        for info, result in zip(infos, self._pool.map(jobs(), count=len(infos)), strict=True):
            sent = received.pop(info.id) if shared is None else shared
            down = self._costs[info.id] if result.down is None else result.down
            if down:
                self.ledger.down(down)
            if isinstance(result, Failure):
                self._reject(info, result.reason, result.detail)
                if not result.heard:
                    self._unheard.add(info.id)
                if result.reason == LOST:
                    self._lost.add(info.id)
                continue
            self.ledger.up(len(result.frame))
            try:
                reply = open_reply(agreement, result.frame, sent, info)
            except PayloadError as error:
                self._reject(info, error.reason, error.detail)
                continue
            self.ledger.paper_bytes += method.paper_bytes(sent, reply.message)
            self.replies += 1
            self._done.append(self._staged(info.id, result))
            for name, value in result.metrics.items():
                self._metrics.setdefault(name, []).append(value)
            yield reply

    def _staged(self, client: int, done: Done) -> _Kept:
        """What the client keeps, in the stores but not yet the client's: a large cohort must not wait in memory."""
        state = self._simulation.state
        personal, codec = state.personal.stage(client, done.personal), state.codec.stage(client, done.codec_state)
        return _Kept(client, personal, codec, done.local)

    def _broadcast(self) -> Tree:
        """Send what all clients of the round share; gives what they then have."""
        agreement, state = self._simulation.agreement, self._simulation.state
        everyone, shared = to_everyone(self._round), {"round": self._round.to_bytes(4, "little")}
        known = None if state.downlink is None else state.downlink.known
        frame, received = send(agreement, state.server, everyone, known)
        costs = [len(frame)] * len(self._cohort)
        if state.downlink is not None:
            shared["known"] = pack(state.downlink.known)
            self._sent = received, len(frame)
            costs = state.downlink.costs(len(frame), self._cohort)
        self._costs = dict(zip(self._cohort, costs, strict=True))
        self._pool.share(frame=frame, **shared)
        return received

    def _reject(self, client: ClientInfo, reason: str, detail: str) -> None:
        self.rejections.append(Rejection(client.id, client.round, reason, detail))


def simulate(
    method: Method,
    clients: Clients,
    *,
    task: Task,
    up: Codec,
    down: Codec,
    rounds: int,
    cohort: int,
    seed: int = 0,
    workers: int | Literal["auto"] = 0,
) -> Iterator[Record]:
    """The plain loop: one record per round."""
    schedule = Schedule(rounds=rounds, cohort=cohort, workers=workers)
    yield from Simulation(method, task, clients, Link(up, down), schedule, seed=seed)


def settings_text(method: Method) -> str:
    """A method's settings as text, the same in every process: no addresses of functions."""
    return _ADDRESS.sub("", repr(method))


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
