"""The embedded engine: many clients on one machine, every frame real.

Every key derives from (seed, round, client) and replies are folded in client order, so the result is the same, bit for
bit, for any number of workers and any order of arrival.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from laconic.core import ClientInfo, Codec, ConfigError, Key, Method, PayloadError, Reply, Task, Tree, flat
from laconic.engine.cohort import sample_cohort
from laconic.engine.downlink import Downlink
from laconic.engine.ledger import Ledger
from laconic.engine.round import Agreement, Link, Score, chunks, open_reply, send, server_round, to_everyone
from laconic.engine.store import ClientStore, pack
from laconic.engine.workers import Clients, Done, Failure, JudgeClient, JudgeServer, Pool, Train, open_pool

Record = dict[str, Any]
"""One round's figures, as they stand in metrics.jsonl."""


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
    personal: ClientStore = field(default_factory=ClientStore)
    codec: ClientStore = field(default_factory=ClientStore)
    local: dict[int, Score] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    downlink: Downlink | None = None


@flat
@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long and how wide a run is.

    `min_replies` fewer accepted replies abandon a round: the state stays as it was. `local_eval` judges every client's
    model on the client's own test data when it is trained.
    """

    rounds: int = 30
    cohort: int = 10
    eval_every: int = 5
    min_replies: int = 1
    local_eval: bool = True
    workers: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        for name in ("rounds", "cohort", "eval_every", "min_replies"):
            if getattr(self, name) < 1:
                raise ConfigError(f"run.{name} must be at least 1, got {getattr(self, name)}.")
        if self.min_replies > self.cohort:
            raise ConfigError(f"run.min_replies ({self.min_replies}) is larger than run.cohort ({self.cohort}).")
        if self.workers != "auto" and self.workers < 0:
            raise ConfigError(f"run.workers must be 'auto' or not negative, got {self.workers}.")


class Simulation:
    """A run, round by round. Iterate to advance; `state` is where it stands."""

    def __init__(
        self, method: Method, task: Task, clients: Clients, link: Link, schedule: Schedule, *, seed: int
    ) -> None:
        if schedule.cohort > clients.num_clients:
            raise ConfigError(
                f"run.cohort is {schedule.cohort}, but there are only {clients.num_clients} clients; "
                "lower run.cohort or raise data.clients."
            )
        self.schedule, self.clients, self.seed = schedule, clients, seed
        self.agreement = Agreement(method.bind(task), link, Key.from_seed(seed))
        self.state = State(0, self.agreement.method.init(self.agreement.key.fold_in("init")))
        if self.agreement.sends_changes:
            self.state.downlink = Downlink(self.agreement.first_known())

    @property
    def method(self) -> Method:
        """The method, bound to the task."""
        return self.agreement.method

    def __iter__(self) -> Iterator[Record]:
        """Advance to the last round, giving each round's record."""
        with _one_thread():
            pool = open_pool(self.agreement, self.clients, workers=self._workers())
            try:
                while self.state.round < self.schedule.rounds:
                    yield self._advance(pool)
            finally:
                pool.close()

    def _workers(self) -> int | Literal["auto"]:
        workers = self.schedule.workers
        return workers if workers == "auto" else min(workers, self.schedule.cohort)

    def _advance(self, pool: Pool) -> Record:
        began = time.perf_counter()
        state, number = self.state, self.state.round + 1
        before = Ledger(**state.ledger.as_dict())
        exchange = _Exchange(self, pool, number)
        server, abandoned = exchange.run()
        record: Record = {
            "round": number,
            "cohort": self.schedule.cohort,
            "replies": exchange.replies,
            "rejected": len(exchange.rejections),
            "bytes_up": state.ledger.bytes_up - before.bytes_up,
            "bytes_down": state.ledger.bytes_down - before.bytes_down,
        }
        if exchange.losses:
            record["train_loss"] = sum(exchange.losses) / len(exchange.losses)
        if exchange.rejections:
            record["rejections"] = [rejection._asdict() for rejection in exchange.rejections]
        if abandoned:
            record["abandoned"] = abandoned
        else:
            state.server = server
            exchange.keep()
        state.round = number
        if number % self.schedule.eval_every == 0 or number == self.schedule.rounds:
            record.update(self._judge(pool))
        record["seconds"] = time.perf_counter() - began
        return record

    def _judge(self, pool: Pool) -> Record:
        """Global: the server's model on the common test set. Local: each client's last model on its own data."""
        state, method = self.state, self.method
        record: Record = {}
        pool.share(server=pack(state.server))
        count = len(chunks(self.clients.test))
        total = Score(0, {})
        for score in pool.map((JudgeServer(i) for i in range(count)), count=count):
            total += score
        record.update({f"global_{name}": value for name, value in total.means().items()})
        if method.stateful:
            known = list(state.personal)
            jobs = (JudgeClient(ClientInfo(c, state.round, 0), state.personal[c]) for c in known)
            state.local = dict(zip(known, pool.map(jobs, count=len(known)), strict=True))
        judged = [score.means() for _, score in sorted(state.local.items()) if score.examples]
        if judged:
            for name in judged[0]:
                record[f"local_{name}"] = sum(means[name] for means in judged) / len(judged)
        record["local_clients"] = len(judged)
        return record


class _Exchange:
    """One round's messages: out, back, decoded, folded; what clients keep is kept only if the round counts."""

    def __init__(self, simulation: Simulation, pool: Pool, round: int) -> None:
        self._simulation, self._pool, self._round = simulation, pool, round
        self.replies = 0
        self.rejections: list[Rejection] = []
        self.losses: list[float] = []
        self._kept: list[tuple[int, Done]] = []

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
        if self.replies < simulation.schedule.min_replies:
            return server, f"{self.replies} replies accepted, {simulation.schedule.min_replies} needed"
        if not _finite(new):
            return server, "the server's state would not be finite"
        return new, ""

    def _stream(self) -> Iterator[Reply]:
        """Accepted replies in client order, as they come."""
        simulation, state = self._simulation, self._simulation.state
        agreement, schedule = simulation.agreement, simulation.schedule
        cohort = sample_cohort(
            agreement.round_key(self._round), clients=simulation.clients.num_clients, cohort=schedule.cohort
        )
        infos = [ClientInfo(c, self._round, 0) for c in cohort]
        per_client: dict[int, Tree] = {}
        if not agreement.method.per_client:
            received = self._broadcast(cohort)

        def jobs() -> Iterator[Train]:
            for info in infos:
                own = None
                if agreement.method.per_client:
                    own, per_client[info.id] = send(agreement, state.server, info)
                    state.ledger.down(len(own))
                yield Train(
                    info,
                    state.personal.get(info.id, b""),
                    state.codec.get(info.id, b""),
                    own,
                    schedule.local_eval and not agreement.method.stateful,
                )

        for info, result in zip(infos, self._pool.map(jobs(), count=len(infos)), strict=True):
            sent = per_client.pop(info.id) if agreement.method.per_client else received
            if isinstance(result, Failure):
                self._reject(info, result.reason, result.detail)
                continue
            state.ledger.up(len(result.frame))
            try:
                reply = open_reply(agreement, result.frame, sent, info)
            except PayloadError as error:
                self._reject(info, error.reason, error.detail)
                continue
            state.ledger.paper_bytes += agreement.method.paper_bytes(sent, reply.message)
            self.replies += 1
            self._kept.append((info.id, result._replace(frame=b"")))
            if "train_loss" in result.metrics:
                self.losses.append(result.metrics["train_loss"])
            yield reply

    def _broadcast(self, cohort: list[int]) -> Tree:
        """Send what all clients of the round share; gives what they then have."""
        agreement, state = self._simulation.agreement, self._simulation.state
        everyone, shared = to_everyone(self._round), {"round": self._round.to_bytes(4, "little")}
        if state.downlink is None:
            frame, received = send(agreement, state.server, everyone)
            state.ledger.down(len(frame) * len(cohort), messages=len(cohort))
        else:
            shared["known"] = pack(state.downlink.known)
            frame, received = send(agreement, state.server, everyone, state.downlink.known)
            state.downlink.update(received, len(frame))
            state.ledger.down(state.downlink.cost(cohort), messages=len(cohort))
        self._pool.share(frame=frame, **shared)
        return received

    def _reject(self, client: ClientInfo, reason: str, detail: str) -> None:
        self.rejections.append(Rejection(client.id, client.round, reason, detail))

    def keep(self) -> None:
        """Store what the clients keep; a client whose reply was refused keeps what it had."""
        state = self._simulation.state
        for client, done in self._kept:
            state.personal[client] = done.personal
            state.codec[client] = done.codec_state
            if done.local is not None:
                state.local[client] = done.local


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


def _finite(tree: Tree) -> bool:
    leaves = [leaf for leaf in tree.values() if leaf.is_floating_point()]
    return all(bool(torch.isfinite(leaf).all()) for leaf in leaves)


@contextmanager
def _one_thread() -> Iterator[None]:
    """One torch thread, as the workers have: sums then come out the same with and without workers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
