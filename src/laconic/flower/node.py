"""A node: one client, its data and its own states, answering the server's calls.

Its local update is the job that a worker of the embedded engine does (`engine.workers.Train`), at a station of
its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from laconic.config import Place, experiment_from, read_table
from laconic.core import ClientInfo, ConfigError, Key, PayloadError
from laconic.engine.round import Agreement, Held, receive, receive_snapshot, to_everyone
from laconic.engine.simulate import Simulation, one_thread
from laconic.engine.store import pack
from laconic.engine.workers import LOST, EvaluateClient, Failure, Station, Train
from laconic.flower.messages import HELD_LOST, Answer, Call, Envelope
from laconic.flower.states import FolderEntries, Lost, States

Table = Mapping[str, Mapping[str, Any]]


def answer_values(
    config: Path | Table, node: Mapping[str, Any], values: Mapping[str, Any], entries: MutableMapping[str, bytes]
) -> dict[str, Any]:
    """The answer to a message, as values of a record: what a `ClientApp` does, without Flower.

    `node` is the node's configuration: which client it is (`partition-id`), and perhaps a source of its own data
    (`data`) and a folder for its client's states (`state`), which otherwise lie in `entries`.
    """
    table = _read(config, config.stat().st_mtime_ns) if isinstance(config, Path) else config
    endpoint = Endpoint(table, _client(node), data=str(node.get("data", "")))
    envelope = Envelope.of(values)
    call, frames = envelope.open(Call), envelope.frames()
    if (folder := str(node.get("state", ""))) and call.kind != "hello":
        name = f"{table['run'].get('name', 'run')}-{endpoint.fingerprint(call.clients)}"
        entries = FolderEntries(Path(folder) / name / str(endpoint.client))
    return endpoint.answer(call, frames, entries)._asdict()


@lru_cache(maxsize=8)
def _read(config: Path, changed: int) -> Table:
    return read_table(config)


def _client(node: Mapping[str, Any]) -> int:
    value = node.get("partition-id")
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f'--node-config "partition-id=…" must be the number of this node\'s client, got {value!r}.')
    return value


class Endpoint:
    """Where a client's calls are answered.

    `table` is the run as the TOML file says it. `data` ("module:function") is the node's own source, which gives a
    federation of this one client: the server's source is then never asked.
    """

    def __init__(self, table: Table, client: int, *, data: str = "") -> None:
        own = {**table, "data": {"source": data}} if data else table
        self._text = json.dumps(own, sort_keys=True)
        self._placed = ":" in str(own["data"].get("source", ""))
        self.client = client

    def fingerprint(self, clients: int) -> str:
        """What the run's frames carry, as text: a name for the folder of its states."""
        return self._simulation(clients).agreement.fingerprint.hex()

    def answer(self, call: Call, frames: Sequence[bytes], entries: MutableMapping[str, bytes]) -> Envelope:
        """The answer to a call; `entries` hold the client's own states, and are changed."""
        if call.kind == "hello":
            return Envelope.around(Answer(kind="here", client=self.client))
        try:
            if call.client != self.client:
                raise PayloadError("client", f"a call for client {call.client}, but client {self.client} lives here")
            with one_thread():  # as the workers of the embedded engine have: sums come out the same
                simulation = self._simulation(call.clients)
                act = _train if call.kind == "train" else _evaluate
                return act(simulation, call, frames, States(entries))
        except Lost as error:
            return _failed(Failure(LOST, f"{error}; it starts afresh at its next local update", heard=False))
        except PayloadError as error:
            return _failed(Failure(error.reason, error.detail, heard=False))

    def _simulation(self, clients: int) -> Simulation:
        # A source of the catalogue gives the same to every client: a process that answers for many needs it once.
        return _built(self._text, Place(self.client, clients) if self._placed else None)


@lru_cache(maxsize=64)
def _built(text: str, place: Place | None) -> Simulation:
    """The run as a client sees it: agreement and data, and a key that nobody else has."""
    simulation = experiment_from(json.loads(text), place=place).simulation
    simulation.agreement = replace(simulation.agreement, secret=Key(os.urandom(16)))
    return simulation


def _train(simulation: Simulation, call: Call, frames: Sequence[bytes], states: States) -> Envelope:
    agreement, station = simulation.agreement, Station(simulation.agreement, simulation.clients)
    client = ClientInfo(call.client, call.round, 0)
    personal, codec_state = states.get("personal", call.personal), states.get("codec", call.codec)
    try:
        has = _caught_up(agreement, call, frames, states)
    except Lost as error:
        raise PayloadError(HELD_LOST, str(error)) from None
    held = states.hold(call.round, has.held) if agreement.builds_on_held else ""
    states.prune("held", floor=call.floor if call.held is not None else call.round, meant=call.held or "")
    station.common = has
    result = Train(client, personal, codec_state, evaluate=call.evaluate).run(station)
    if isinstance(result, Failure):
        return _failed(result)
    for kind, meant in (("personal", call.personal), ("codec", call.codec)):
        states.prune(kind, floor=call.floor, meant=meant)
    answer = Answer(
        kind="done",
        client=call.client,
        personal=states.put("personal", call.round, result.personal),
        codec=states.put("codec", call.round, result.codec_state),
        held="" if call.held is None else held,
        examples=None if result.local is None else result.local.examples,
        sums={} if result.local is None else dict(result.local.sums),
        metrics=result.metrics,
        seconds=result.seconds,
    )
    return Envelope.around(answer, [result.frame])


def _caught_up(agreement: Agreement, call: Call, frames: Sequence[bytes], states: States) -> Held:
    """What the client has after all frames of a call."""
    if not frames:
        raise PayloadError("envelope", "a call without a frame")
    if call.held is not None:
        before = states.held(call.held) if call.held else agreement.first_held()
        client = ClientInfo(call.client, call.round, 0)
        return receive(agreement, frames[0], client, before if agreement.remembers else None)
    everyone = to_everyone(call.round)
    if not agreement.builds_on_held:
        return receive(agreement, frames[0], everyone)
    if call.after is None:
        return receive_snapshot(agreement, frames[0], everyone)
    # From the very first frame on, nothing that is kept is needed, not even what a run before this one left.
    at, held = (states.newest_held() if call.after else None) or (0, agreement.first_held())
    if not call.after <= at <= call.round:
        raise Lost(f"what clients hold after round {call.after} is not here")
    has = Held(agreement.received_of(held, everyone, held), held)
    for number, frame in enumerate(frames, start=call.after + 1):
        if number > at:  # an answer that came too late had its frames already
            has = receive(agreement, frame, to_everyone(number), has.held)
    return has


def _evaluate(simulation: Simulation, call: Call, frames: Sequence[bytes], states: States) -> Envelope:
    client = ClientInfo(call.client, call.round, 0)
    at = client if simulation.method.per_client else to_everyone(call.round)
    newest = pack(receive_snapshot(simulation.agreement, b"".join(frames), at).received)
    station = Station(simulation.agreement, simulation.clients, {"newest": newest})
    score = EvaluateClient(client, states.get("personal", call.personal)).run(station)
    return Envelope.around(
        Answer(kind="score", client=call.client, examples=score.examples, sums=dict(score.sums)),
    )


def _failed(failure: Failure) -> Envelope:
    return Envelope.around(
        Answer(kind="failed", reason=failure.reason, detail=failure.detail[:1000], heard=failure.heard)
    )
