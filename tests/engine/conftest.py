"""A federation of a few dozen points, and a FedAvg whose clients misbehave on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from laconic.codecs import parse
from laconic.core import ClientData, ClientInfo, Key, Predictor, Task, Tree, Update
from laconic.data import Federation
from laconic.engine import Link, Schedule, Simulation
from laconic.methods import Solver
from laconic.methods.em import EM, predictor
from laconic.methods.gaussian import Gaussian

FEATURES, CLASSES, CLIENTS = 5, 3, 12
PRIOR, SOLVER = Gaussian(), Solver(lr=0.1, local_epochs=1, batch_size=4)


@dataclass(frozen=True)
class Hooked(EM):
    """FedAvg whose clients do something `before` they train, and change what they give `after`."""

    name: str = "hooked"
    prior: Gaussian = PRIOR
    solver: Solver = SOLVER
    before: Callable[[ClientInfo], object] | None = None
    after: Callable[[ClientInfo, Update], Update] | None = None

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        if self.before is not None:
            self.before(client)
        update = EM.client_update(self, received, personal, data, client, key)
        return update if self.after is None else self.after(client, update)


@dataclass(frozen=True)
class Remembering(Hooked):
    """Clients count their turns and remember where they ended; they predict with that."""

    name: str = "remembering"
    stateful = True

    def init_client(self, key: Key) -> Tree:
        return {"turns": torch.zeros(1, dtype=torch.int64)}

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        update = Hooked.client_update(self, received, personal, data, client, key)
        own = {name: received[name] + update.message[name] for name in received}
        return replace(update, personal={"turns": personal["turns"] + 1, **{f"own/{n}": v for n, v in own.items()}})

    def local_model(self, received: Tree, personal: Tree) -> Predictor:
        return predictor(self.task, {n.removeprefix("own/"): v for n, v in personal.items() if n.startswith("own/")})


def federation(seed: int = 0) -> Federation:
    random = np.random.default_rng(seed)
    teacher = random.standard_normal((FEATURES, CLASSES))
    clients = []
    for client in range(CLIENTS):
        x = random.standard_normal((10 + client, FEATURES)).astype(np.float32)
        clients.append((x, (x @ teacher).argmax(1)))
    return Federation.from_clients(clients, test_fraction=0.3, classes=CLASSES)


def simulation(
    method: EM | None = None,
    *,
    data: Federation | None = None,
    task: Task | None = None,
    up: str = "float32",
    down: str = "float32",
    seed: int = 0,
    **schedule: Any,
) -> Simulation:
    settings = {"rounds": 3, "cohort": 6, "workers": 0, "eval_every": 1, **schedule}
    return Simulation(
        method or Hooked(),
        task or Task(partial(nn.Linear, FEATURES, CLASSES)),
        data or federation(),
        Link(parse(up), parse(down)),
        Schedule(**settings),
        seed=seed,
    )


@dataclass(frozen=True)
class Toys:
    Hooked: type[Hooked] = Hooked
    Remembering: type[Remembering] = Remembering
    federation: Callable[..., Federation] = federation
    simulation: Callable[..., Simulation] = simulation
    clients: int = CLIENTS


@pytest.fixture(scope="session")
def toys() -> Toys:
    return Toys()
