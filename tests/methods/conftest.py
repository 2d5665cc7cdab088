from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from laconic.codecs import parse
from laconic.core import Bound, ClientData, ClientInfo, Key, Method, Part, Population, Reply, Task, Tree, subtree
from laconic.engine import Link, Schedule, Simulation, unpack
from laconic.evaluations import EVALUATIONS
from laconic.testing import small_federation, small_task


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As engines compute. On models of fifty weights, threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def inside(bound: Bound) -> Any:
    """The object whose functions a bound method consists of."""
    return bound.init.__self__  # type: ignore[attr-defined]


_TASK = small_task()


def definition(method: Method) -> tuple[object, ...]:
    """All that a method is, in a form that can be compared: what it says of itself, and what it computes with."""
    return method.name, dict(method.settings), method.link, shown(inside(method.bind(_TASK)))


def shown(value: Any) -> Any:
    """What an object computes with; of a function, which one it is and what it has from around it."""
    if inspect.isfunction(value):
        around = {name: shown(held) for name, held in inspect.getclosurevars(value).nonlocals.items()}
        return value.__module__, value.__qualname__, around
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), {field.name: shown(getattr(value, field.name)) for field in fields(value)}
    return repr(value)


class Ended(NamedTuple):
    """What a run came to."""

    server: Tree
    personal: dict[int, Tree]
    losses: list[float]
    task: Task


@pytest.fixture
def ended() -> Callable[..., Ended]:
    """Run a method on the small task, with dropout and, unless told otherwise, batch normalisation."""

    def run(method: Method, *, rounds: int = 3, cohort: int = 4, batch_norm: bool = True, **link: str) -> Ended:
        both = Link(*(parse(link.get(way, "float32")) for way in ("up", "down")))
        schedule = Schedule(rounds=rounds, cohort=cohort, eval_every=1)
        task, data = small_task(batch_norm=batch_norm), small_federation()
        simulation = Simulation(method, task, data, both, schedule, seed=0, workers=0, evaluations=EVALUATIONS)
        records = list(simulation)
        assert not [record for record in records if "rejections" in record]
        state = simulation.state
        personal = {client: unpack(kept) for client, kept in state.personal.items()}
        return Ended(state.server, personal, [record.clients["train_loss"] for record in records], task)

    return run


class _One(nn.Module):
    """A model with one weight φ that predicts it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.expand(len(x))


class Valleys:
    """Clients with losses a_i/2 (φ − m_i)², in one weight: a = (1, 4), m = (0, 3).

    The mean loss is least at Σ a_i m_i / Σ a_i = 2.4. Clients that go all the way have a mean of 1.5.
    """

    least, mean = 2.4, 1.5
    slopes, bottoms = (1.0, 4.0), (0.0, 3.0)

    def __init__(self) -> None:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            return (target[:, 0] / 2 * (output - target[:, 1]).square()).mean()

        self.task = Task(_One, loss=loss, metrics={}, outputs="values")
        parts = [
            Part.whole(torch.zeros(1), torch.tensor([pair])) for pair in zip(self.slopes, self.bottoms, strict=True)
        ]
        self.data = [ClientData(part, part) for part in parts]

    def descend(self, method: Method, *, rounds: int) -> tuple[Tree, list[Tree]]:
        """The server's last state and the clients' own, every client in every round."""
        bound: Any = method.bind(self.task, Population(2, 2))
        server, personal = bound.init(Key.from_seed(0)), [{}, {}]
        for number in range(1, rounds + 1):
            replies = []
            for c, data in enumerate(self.data):
                client, key = ClientInfo(c, number, 1), Key.from_seed(number).fold_in(c)
                received = bound.broadcast(server, client, key)
                update = bound.client_update(received, personal[c], data, client, key)
                personal[c] = update.personal
                replies.append(Reply(client, update.message, received))
            server = bound.server_update(server, replies, Key.from_seed(number))
        return server, personal


@pytest.fixture
def valleys() -> Valleys:
    return Valleys()


@pytest.fixture
def same() -> Callable[[Tree, Tree], bool]:
    """Whether two trees have the same leaves, bit for bit, in whatever order."""

    def equal(one: Tree, other: Tree) -> bool:
        return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

    return equal


@pytest.fixture
def weights() -> Callable[[Ended], Tree]:
    """The server's weights."""
    return lambda run: subtree("w", run.server)
