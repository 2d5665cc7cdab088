"""A federation of a few dozen points, and a FedAvg whose clients misbehave on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from laconic.codecs import parse
from laconic.core import (
    ALONE,
    Bound,
    ClientData,
    ClientInfo,
    Key,
    Method,
    Population,
    Predictor,
    Reply,
    Task,
    Tree,
    Update,
)
from laconic.data import Federation
from laconic.engine import Evaluation, Link, Schedule, Simulation
from laconic.evaluations import EVALUATIONS
from laconic.methods import Solver, fedavg
from laconic.methods.em import predictor

FEATURES, CLASSES, CLIENTS = 5, 3, 12
SOLVER = Solver(lr=0.1, local_epochs=1, batch_size=4)


def hooked(
    method: Method | None = None,
    *,
    name: str = "hooked",
    before: Callable[[ClientInfo], object] | None = None,
    after: Callable[[ClientInfo, Update], Update] | None = None,
    replies: Callable[[Iterable[Reply]], Iterable[Reply]] | None = None,
) -> Method:
    """A method (FedAvg) whose clients do something `before` they train, and change what they give `after`."""
    inner = method or fedavg(solver=SOLVER)

    def bind(task: Task, population: Population = ALONE) -> Bound:
        bound = inner.bind(task, population)

        def client_update(received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
            if before is not None:
                before(client)
            update = bound.client_update(received, personal, data, client, key)
            return update if after is None else after(client, update)

        def server_update(server: Tree, came: Iterable[Reply], key: Key) -> Tree:
            return bound.server_update(server, came if replies is None else replies(came), key)

        return replace(bound, client_update=client_update, server_update=server_update)

    return replace(inner, name=name, bind=bind)


def remembering(**hooks: Any) -> Method:
    """Clients count their local updates and remember where they ended; they predict with that."""
    inner = hooked(name="remembering", **hooks)

    def bind(task: Task, population: Population = ALONE) -> Bound:
        bound = inner.bind(task, population)

        def init_client(key: Key) -> Tree:
            return {"updates": torch.zeros(1, dtype=torch.int64)}

        def client_update(received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
            update = bound.client_update(received, personal, data, client, key)
            own = {f"own/{name}": received[name] + update.message[name] for name in received}
            return replace(update, personal={"updates": personal["updates"] + 1, **own})

        def local_model(received: Tree, personal: Tree) -> Predictor:
            return predictor(task, {n.removeprefix("own/"): v for n, v in personal.items() if n.startswith("own/")})

        return replace(
            bound,
            personal=True,
            own_model=True,
            init_client=init_client,
            client_update=client_update,
            local_model=local_model,
        )

    return replace(inner, bind=bind)


def federation(seed: int = 0) -> Federation:
    random = np.random.default_rng(seed)
    teacher = random.standard_normal((FEATURES, CLASSES))
    clients = []
    for client in range(CLIENTS):
        x = random.standard_normal((10 + client, FEATURES)).astype(np.float32)
        clients.append((x, (x @ teacher).argmax(1)))
    return Federation.from_clients(clients, test_fraction=0.3, classes=CLASSES)


def simulation(
    method: Method | None = None,
    *,
    data: Federation | None = None,
    task: Task | None = None,
    up: str = "float32",
    down: str = "float32",
    seed: int = 0,
    evaluations: Sequence[Evaluation] = EVALUATIONS,
    workers: int = 0,
    store: Any = "memory",
    **schedule: Any,
) -> Simulation:
    return Simulation(
        method or hooked(),
        task or Task(partial(nn.Linear, FEATURES, CLASSES)),
        data or federation(),
        Link(parse(up), parse(down)),
        Schedule(**{"rounds": 3, "cohort": 6, "eval_every": 1, **schedule}),
        seed=seed,
        evaluations=evaluations,
        workers=workers,
        store=store,
    )


@dataclass(frozen=True)
class Toys:
    hooked: Callable[..., Method] = hooked
    remembering: Callable[..., Method] = remembering
    federation: Callable[..., Federation] = federation
    simulation: Callable[..., Simulation] = simulation
    clients: int = CLIENTS


@pytest.fixture(scope="session")
def toys() -> Toys:
    return Toys()
