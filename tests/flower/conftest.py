"""A federation in one process: nodes that answer at once, without Flower."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from laconic.config import experiment_from
from laconic.engine import Run
from laconic.engine.workers import Failure, InProcess, Job, Train
from laconic.flower.apps import serve
from laconic.flower.messages import Call, Envelope
from laconic.flower.node import Endpoint
from laconic.flower.nodes import TransportReply

Table = dict[str, dict[str, Any]]

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": {"name": "fedavg"}},
    "fedsparse": {"method": {"name": "fedsparse"}},
    "fedpm": {"method": {"name": "fedpm"}},
    "lg_fedavg": {"method": {"name": "lg_fedavg"}},
    "eden": {"method": {"name": "fedavg"}, "link": {"up": "ef(eden:bits=2)", "down": "eden:bits=4"}},
}
"""The five that must come out the same on every engine, bit for bit."""

OTHERS: dict[str, dict[str, Any]] = {
    "feddrop": {"method": {"name": "feddrop"}},  # a broadcast of its own for every client
    "vardrop": {"method": {"name": "vardrop"}},  # clients that hold replicas of one tree
    "mtl": {"method": {"name": "mtl"}},  # a model for every client, before its first local update too
}
"""What takes other ways through the engine."""


def table_for(name: str, *, rounds: int = 3, clients: int = 3, cohort: int | None = None, **run: Any) -> Table:
    """A small run on the digits."""
    table: Table = {
        "run": {"name": name, "rounds": rounds, "cohort": cohort or clients, "eval_every": rounds, "workers": 0, **run},
        "data": {"source": "digits", "clients": clients},
        "model": {"name": "mlp", "hidden": [16]},
        "link": {},
    }
    return {**table, **json.loads(json.dumps({**METHODS, **OTHERS}.get(name, {"method": {"name": name}})))}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run as a file."""
    path = tmp_path / "given.toml"
    path.write_text(tomli_w.dumps({k: v for k, v in table_for("fedavg").items() if v}))
    return path


@dataclass
class Village:
    """A transport whose nodes live next door: a message is answered when it is asked for.

    `fault(call, answer)` may change an answer, or give None for one that never comes. `names` is a way to meddle with
    what is pulled.
    """

    table: Table
    clients: int
    fault: Callable[[int, Call, Envelope], Envelope | None] = lambda client, call, answer: answer
    entries: dict[int, dict[str, bytes]] = field(default_factory=dict)
    outbox: dict[str, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)
    online: set[int] = field(default_factory=set)
    calls: list[Call] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        self.online = set(range(self.clients))

    def nodes(self) -> Iterable[int]:
        return [100 + client for client in self.online]

    def push(self, node: int, values: Mapping[str, Any], *, kind: str, round: int, seconds: float) -> str | None:
        self.count += 1
        self.outbox[str(self.count)] = (node, dict(values))
        return str(self.count)

    def pull(self, names: Iterable[str]) -> Iterable[TransportReply]:
        for name in names:
            if name in self.outbox:
                node, values = self.outbox.pop(name)
                client = node - 100
                envelope = Envelope.of(values)
                call = envelope.open(Call)
                self.calls.append(call)
                answer = Endpoint(self.table, client).answer(
                    call, envelope.frames(), self.entries.setdefault(client, {})
                )
                changed = self.fault(client, call, answer) if call.kind != "hello" else answer
                if changed is not None:
                    yield TransportReply(name, node, changed._asdict())

    def run(self, *, deadline: float = 5.0, **options: Any) -> Run:
        table = {**self.table, "deploy": {"deadline": deadline}}
        return serve(self, experiment_from(table), **options)


class Lossy(InProcess):
    """The embedded engine without certain replies: what a federation that lost them must equal."""

    lost: Mapping[int, set[int]]

    def map(self, jobs: Iterable[Job], *, count: int) -> Iterator[Any]:
        jobs = list(jobs)
        for job, result in zip(jobs, super().map(jobs, count=count), strict=True):
            gone = isinstance(job, Train) and job.client.id in self.lost.get(job.client.round, set())
            yield Failure("lost", "in this test", heard=False) if gone else result


def reference(table: Table, records: Iterable[Mapping[str, Any]]) -> Run:
    """An embedded run over exactly the replies that another one counted."""
    experiment = experiment_from(table)
    pool = Lossy(experiment.simulation.agreement, experiment.simulation.clients)
    pool.lost = {r["round"]: {x["client"] for x in r.get("rejections", ())} for r in records}
    experiment.simulation.carrier = lambda simulation: pool
    return experiment.run()
