"""The server's side: jobs go to nodes, and come back by a deadline or not at all.

Which node is which client's, a table says that registration wrote (`registry`); in a trial without one, a node says it
itself when it is first seen. A reply counts once: the first that comes in time, from the node that was asked, for the
message that was asked; its frame then has to pass `open_reply` like any other. Evaluations of the server's own model
are done here.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import Any, NamedTuple, Protocol

from laconic.core import ConfigError, PayloadError, accuracy
from laconic.engine.downlink import Downlink
from laconic.engine.round import Score, send, send_snapshot, to_everyone
from laconic.engine.simulate import Simulation
from laconic.engine.store import pack, unpack
from laconic.engine.workers import Done, EvaluateClient, Failure, InProcess, Job, Train
from laconic.flower.messages import HELD_LOST, Answer, Call, Envelope, held_name

log = logging.getLogger("laconic")
OVERHEAD_UP = 13_000
OVERHEAD_DOWN = 4_000
"""Bytes of transport around a message, polling included: measured over TLS (docs/deploy.md)."""
_QUICK, _SLOW = 0.05, 0.5  # seconds between looks for replies: at first, and after a while
_LOOK = 2.0  # seconds between looks for nodes that are not there yet


class TransportReply(NamedTuple):
    """A reply: to which message, from which node, and what it holds, or why it holds nothing."""

    to: str
    node: int
    values: Mapping[str, Any] | None
    error: str = ""


class Transport(Protocol):
    """What carries messages: a Flower grid (see `apps`), or a test's own."""

    def nodes(self) -> Iterable[int]:
        """The nodes that are connected."""
        ...

    def push(self, node: int, values: Mapping[str, Any], *, kind: str, round: int, seconds: float) -> str | None:
        """Send a message that is good for so long; gives its name, if it was taken."""
        ...

    def pull(self, names: Iterable[str]) -> Iterable[TransportReply]:
        """The replies that have come to messages of these names."""
        ...


@dataclass(frozen=True)
class _Asked:
    """A message that is out: to which node, for whom, and how many bytes of frames it had."""

    node: int
    client: int
    round: int
    number: int = -1
    num_bytes: int = 0
    held: bytes = b""
    """What the client holds once it has heard this, where it was sent a frame of its own."""
    again: Callable[[_Batch], None] | None = None
    """Asks once more, from what everybody holds at first or by a snapshot."""


@dataclass
class _Traffic:
    """A round's figures of the transport."""

    up: int = 0
    down: int = 0
    evaluating: int = 0
    late: int = 0


@dataclass
class _Batch:
    """The jobs of one call of `map`, and what has come of them."""

    finished: dict[int, Any] = field(default_factory=dict)
    waiting: dict[str, _Asked] = field(default_factory=dict)


class Nodes:
    """A pool whose stations are nodes on other machines.

    `deadline` seconds after a batch of jobs began, whoever has not answered is given up. `floor` says before which
    round no checkpoint will go back. `networked` tells whether messages cross a network, whose bytes are estimated.
    `stop`, once set, interrupts the run. `registered` is the node of each client; without it nodes say who they are.
    """

    def __init__(
        self,
        transport: Transport,
        simulation: Simulation,
        *,
        deadline: float,
        floor: Callable[[], int] | None = None,
        networked: bool = True,
        stop: Event | None = None,
        registered: Mapping[int, int] | None = None,
    ) -> None:
        for one in simulation.evaluations:
            if one.at_end:
                raise ConfigError(
                    f"the evaluation {type(one).__name__} needs all clients' data in one place: leave it out of "
                    "run.evaluations, or use the embedded engine."
                )
        if simulation.population.newcomer is not None:
            raise ConfigError("a newcomer needs all clients' data in one place: use the embedded engine for it.")
        self._transport, self._simulation, self._deadline = transport, simulation, deadline
        self._floor = floor or (lambda: max(0, simulation.state.round - 1))
        self._stop = stop or Event()
        self._networked = networked
        self._registered = registered
        clients = simulation.clients.num_clients
        if registered is not None and (odd := sorted(registered.keys() - set(range(clients)))):
            raise ConfigError(f"the table of nodes has a client {odd[0]}, but there are {clients}; register them anew.")
        self._here = InProcess(simulation.agreement, simulation.clients)
        self._shared: dict[str, bytes] = {}
        self._frames: dict[int, bytes] = {}
        self._node_of: dict[int, int] = {}
        self._met: dict[int, int | None] = {}
        """The client of each node that has said who it is; None while, or where, that is not known."""
        self._hellos: dict[str, _Asked] = {}
        self._overdue: dict[str, _Asked] = {}
        self._traffic = _Traffic()
        self._gathered = False
        down = simulation.state.downlink
        if down is not None and simulation.state.round:
            down.oldest = len(down.sent)  # frames of the rounds before a checkpoint are gone: everybody gets a snapshot

    # --- the pool ----------------------------------------------------------------------------------------------------

    def share(self, **values: bytes) -> None:
        """Keep what the round's messages will be made of."""
        self._shared.update(values)
        self._here.share(**values)
        down = self._simulation.state.downlink
        if "frame" in values and down is not None:
            self._frames[int.from_bytes(self._shared["round"], "little")] = values["frame"]
            self._frames = {number: frame for number, frame in self._frames.items() if number > down.reach()}

    def map(self, jobs: Iterable[Job], *, count: int) -> Iterator[Any]:
        """Results in the order of the jobs; a `Failure` for whoever is not there or does not answer in time."""
        stream = iter(jobs)
        first = next(stream, None)
        if first is None:
            return
        jobs = itertools.chain([first], stream)
        if not isinstance(first, Train | EvaluateClient):
            yield from self._here.map(jobs, count=count)
            return
        asked = [job for job in jobs if isinstance(job, Train | EvaluateClient)]
        if not self._gathered:  # the clock of the first round does not run while nodes are being started
            everyone = range(self._simulation.clients.num_clients)
            self._gather(everyone, needed=len(everyone), ends=time.monotonic() + self._deadline)
            self._gathered = True
        ends = time.monotonic() + self._deadline
        needed = min(self._simulation.schedule.min_replies, len(asked))
        self._gather([job.client.id for job in asked], needed=needed, ends=ends)
        batch = _Batch()
        for number, job in enumerate(asked):
            self._ask(batch, number, job, ends)
        given, pause = 0, _QUICK
        while given < count:
            if given in batch.finished:
                yield batch.finished.pop(given)
                given += 1
            elif not self._collect(batch):
                if time.monotonic() >= ends:
                    self._give_up(batch)
                else:
                    self._sleep(min(pause, max(0.0, ends - time.monotonic())))
                    pause = min(_SLOW, pause * 1.3)

    def figures(self) -> dict[str, Any]:
        """The round's transport: the payloads and, estimated, what Flower puts around them."""
        traffic, self._traffic = self._traffic, _Traffic()
        figures = {"late": traffic.late, "evaluation_bytes_down": traffic.evaluating}
        if self._networked:
            figures |= {"transport_bytes_up": traffic.up, "transport_bytes_down": traffic.down}
        return {name: value for name, value in figures.items() if value}

    def close(self) -> None:
        """Nodes go on without us."""

    # --- who is there ------------------------------------------------------------------------------------------------

    def _gather(self, clients: Sequence[int], *, needed: int, ends: float) -> None:
        """Wait until so many of these clients have a node: all when the run begins, later as many as a round needs."""
        looked = -_LOOK
        while True:
            if time.monotonic() - looked >= _LOOK:
                self._look()
                looked = time.monotonic()
            self._collect(_Batch())
            if sum(client in self._node_of for client in clients) >= needed or time.monotonic() >= ends:
                return
            self._sleep(0.2)

    def _look(self) -> None:
        """See which nodes are connected; ask new ones who they are."""
        there = set(self._transport.nodes())
        if self._registered is not None:
            before, self._node_of = self._node_of, {c: node for c, node in self._registered.items() if node in there}
            for gone in sorted(before.keys() - self._node_of.keys()):
                log.warning("the node of client %d is gone", gone)
            return
        for node in set(self._met) - there:
            client = self._met.pop(node)
            if client is not None:
                log.warning("the node of client %d is gone", client)
                del self._node_of[client]
                # A second one, which was not let in then, may be the client's now.
                asking = {asked.node for asked in self._hellos.values()}
                self._met = {n: c for n, c in self._met.items() if c is not None or n in asking}
        for node in sorted(there - set(self._met)):
            self._met[node] = None
            hello = Envelope.around(Call(kind="hello"))
            pushed = self._transport.push(node, hello._asdict(), kind="query", round=0, seconds=self._deadline)
            if pushed is not None:
                self._hellos[pushed] = _Asked(node, -1, 0)

    def _greeted(self, asked: _Asked, reply: TransportReply) -> None:
        try:
            client = self._opened(reply, asked)[0].client
        except PayloadError as error:
            log.warning("a node does not say who it is: %s", error)
            self._met.pop(asked.node, None)  # it is asked again when we look the next time
            return
        if client >= self._simulation.clients.num_clients:
            log.warning("a node says it is client %d, but there are %d", client, self._simulation.clients.num_clients)
        elif client in self._node_of:
            # One client, one vote: who came first stays, until it goes.
            log.warning("a second node says it is client %d; it is not asked", client)
        else:
            self._node_of[client], self._met[asked.node] = asked.node, client

    # --- messages ----------------------------------------------------------------------------------------------------

    def _ask(
        self,
        batch: _Batch,
        number: int,
        job: Train | EvaluateClient,
        ends: float,
        *,
        afresh: bool = False,
        spent: int = 0,
    ) -> None:
        """Send a job to its node; `afresh` as to one that holds nothing, after `spent` bytes in vain."""
        client, left = job.client.id, ends - time.monotonic()
        node = self._node_of.get(client)
        if node is None:
            batch.finished[number] = Failure("offline", "its node is not connected", down=0, heard=False)
            return
        if left <= 0:
            batch.finished[number] = Failure("deadline", "no time was left to ask it", down=0, heard=False)
            return
        words, frames, held = self._train(job, afresh) if isinstance(job, Train) else self._evaluate(job)
        num_bytes = sum(map(len, frames))
        kind = "train" if isinstance(job, Train) else "evaluate"
        values = Envelope.around(words, frames)._asdict()
        pushed = self._transport.push(node, values, kind=kind, round=job.client.round, seconds=left)
        if pushed is None:
            batch.finished[number] = Failure("offline", "its message was not taken", down=spent, heard=False)
            return
        self._traffic.down += num_bytes + OVERHEAD_DOWN
        if kind == "evaluate":
            self._traffic.evaluating += num_bytes
        spent += num_bytes
        again = None if afresh else partial(self._ask, number=number, job=job, ends=ends, afresh=True, spent=spent)
        batch.waiting[pushed] = _Asked(node, client, job.client.round, number, spent, held, again)

    def _train(self, job: Train, afresh: bool) -> tuple[Call, list[bytes], bytes]:
        """The words and frames of a local update (one of its own, those that the client lacks, or a snapshot), and
        what the client holds after one of its own."""
        simulation, down, number = self._simulation, self._simulation.state.downlink, job.client.round
        after, base, held = None, None, b""
        if job.held is not None:
            before = b"" if afresh else job.held
            frame, has = self._here.station.sent(job.client, before)
            frames, held = [frame], pack(has.held)
            base = self._name_of(job.client.id, before)
        elif down is not None:
            (after,) = [None] if afresh else down.since(len(self._shared["frame"]), [job.client.id])
            if after is None:
                frames = [self._snapshot(down, number)]
            else:
                frames = [self._frames[missed] for missed in range(after + 1, number + 1)]
        else:
            frames = [self._shared["frame"]]
        words = Call(
            kind="train",
            client=job.client.id,
            clients=simulation.clients.num_clients,
            round=number,
            evaluate=job.evaluate,
            personal=job.personal.decode(),
            codec=job.codec_state.decode(),
            held=base,
            after=after,
            floor=self._floor(),
        )
        return words, frames, held

    def _name_of(self, client: int, held: bytes) -> str:
        """What both ends call the tree that a client holds."""
        memories = self._simulation.state.memories
        return held_name(memories.contacts[client].round, unpack(held)) if held and memories is not None else ""

    def _name_after(self, asked: _Asked) -> str:
        """What both ends call the tree that a client holds after a frame of its own; none where nothing is held."""
        remembered = asked.held and self._simulation.state.memories is not None
        return held_name(asked.round, unpack(asked.held)) if remembered else ""

    def _snapshot(self, down: Downlink, round: int) -> bytes:
        """The frame for those that missed too much, made once a round."""
        name = f"snapshot-{round}"
        if name not in self._shared:
            for old in [key for key in self._shared if key.startswith("snapshot-")]:
                del self._shared[old]
            agreement, everyone = self._simulation.agreement, to_everyone(round)
            received = send(agreement, self._simulation.state.server, everyone, down.held)[1].received
            self._shared[name] = send_snapshot(agreement, received, everyone)
        return self._shared[name]

    def _evaluate(self, job: EvaluateClient) -> tuple[Call, list[bytes], bytes]:
        """What a client evaluates: what it would have of the newest broadcast. No traffic of the training's."""
        agreement, server = self._simulation.agreement, self._simulation.state.server
        if agreement.method.per_client:
            frame = send_snapshot(agreement, agreement.broadcast(server, job.client), job.client)
        else:
            frame = send_snapshot(agreement, unpack(self._shared["newest"]), to_everyone(job.client.round))
        words = Call(
            kind="evaluate",
            client=job.client.id,
            clients=self._simulation.clients.num_clients,
            round=job.client.round,
            personal=(job.personal or b"").decode(),
        )
        return words, [frame], b""

    def _collect(self, batch: _Batch) -> bool:
        """Take in what has come; whether anything has."""
        outstanding = {**self._hellos, **self._overdue, **batch.waiting}
        if not outstanding:
            return False
        came = False
        for reply in self._transport.pull(list(outstanding)):
            name = reply.to
            came = True
            if name in self._hellos:
                self._greeted(self._hellos.pop(name), reply)
            elif name in self._overdue:
                late = self._overdue.pop(name)
                if reply.values is not None:
                    self._traffic.late += 1
                    log.warning("the reply of client %d for round %d came late: refused", late.client, late.round)
            elif name in batch.waiting:
                asked = batch.waiting.pop(name)
                result = self._result(asked, reply)
                if isinstance(result, Failure) and result.reason == HELD_LOST and asked.again is not None:
                    log.warning("client %d does not hold what it should (%s): sent anew", asked.client, result.detail)
                    asked.again(batch)
                else:
                    batch.finished[asked.number] = result
            else:
                log.warning("a reply that nobody waits for (sent twice?): refused")
        return came

    def _result(self, asked: _Asked, reply: TransportReply) -> Done | Score | Failure:
        try:
            answer, frames = self._opened(reply, asked)
            self._traffic.up += sum(map(len, frames)) + OVERHEAD_UP
            if answer.kind == "failed":
                reason, held = answer.reason or "client_error", asked.held if answer.heard else b""
                return Failure(reason, answer.detail, asked.num_bytes, answer.heard, held)
            score = self._score(answer)
            if answer.kind == "score" and score is not None:
                return score
            if answer.kind != "done" or len(frames) != 1:
                raise PayloadError("envelope", f"an answer of kind {answer.kind!r} with {len(frames)} frames")
            if answer.held != self._name_after(asked):
                raise PayloadError("held", "the client holds something else than what it was sent")
        except PayloadError as error:
            # It was asked and it answered, but whether it has what was sent is not sure.
            return Failure(error.reason, error.detail, asked.num_bytes, heard=False)
        return Done(
            frames[0],
            answer.personal.encode(),
            answer.codec.encode(),
            score,
            dict(answer.metrics),
            answer.seconds,
            asked.num_bytes,
            asked.held,
        )

    def _opened(self, reply: TransportReply, asked: _Asked) -> tuple[Answer, list[bytes]]:
        if reply.values is None:
            raise PayloadError("node_error", " ".join(reply.error.split())[:500])
        if reply.node != asked.node:
            raise PayloadError("node", "the answer of another node than the one that was asked")
        envelope = Envelope.of(reply.values)
        return envelope.open(Answer), envelope.frames()

    def _score(self, answer: Answer) -> Score | None:
        if answer.examples is None:
            return None
        expected = {"loss", *self._simulation.method.task.metrics}
        if answer.sums.keys() != expected or answer.examples > self._simulation.agreement.max_examples:
            raise PayloadError("envelope", f"a score of {sorted(answer.sums)} over {answer.examples} examples")
        task, most = self._simulation.method.task, self._simulation.agreement.max_value
        for name, total in answer.sums.items():
            low, high = (0, 1) if task.metrics.get(name) is accuracy else (-most, most)
            if not low * answer.examples <= total <= high * answer.examples:
                raise PayloadError("envelope", f"a score of {total:g} for {name!r} over {answer.examples} examples")
        return Score(
            answer.examples, {name: answer.sums[name] for name in ("loss", *self._simulation.method.task.metrics)}
        )

    def _give_up(self, batch: _Batch) -> None:
        """The deadline: whoever still works is left out, and what it sends later is refused."""
        for name, asked in batch.waiting.items():
            detail = f"no answer within {self._deadline:g} s"
            batch.finished[asked.number] = Failure("deadline", detail, asked.num_bytes, heard=False)
            self._overdue[name] = asked
        batch.waiting.clear()

    def _sleep(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise KeyboardInterrupt
