"""A method is a record of functions: what is optional has a default, and what changes one function keeps all others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, FrozenInstanceError, fields, replace
from typing import Any

import pytest
import torch
from torch import nn

from laconic.core import (
    ALONE,
    Bound,
    ClientData,
    ClientInfo,
    ConfigError,
    Goal,
    Key,
    Memory,
    Method,
    Part,
    Phases,
    Population,
    Reply,
    Task,
    Tree,
    Update,
    dense_bytes,
    on_messages,
)

KEY = Key.from_seed(0)
TASK = Task(lambda: nn.Linear(2, 1))
CLIENT = ClientInfo(2, 1, 0)
DATA = ClientData(*(Part.whole(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)) for _ in range(2)))


def counted(task: Task = TASK, population: Population = ALONE) -> Bound:
    """Clients send their numbers, the server adds them up."""

    def client_update(received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        return Update({"number": torch.tensor([float(client.id)])}, {"kept": torch.ones(1)}, metrics={"loss": 2.0})

    def server_update(server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        return {"sum": server["sum"] + sum(reply.message["number"] for reply in replies)}

    return Bound(
        task=task,
        init=lambda key: {"sum": torch.zeros(1)},
        broadcast=lambda server, client, key: dict(server),
        broadcast_spec=lambda client, key: {},
        client_update=client_update,
        message_spec=lambda received: {},
        server_update=server_update,
        global_model=lambda server: task.fresh(),
    )


METHOD = Method("counted", {"step": 1}, counted, ("mask", "float32"))


def replies(*numbers: float) -> list[Reply]:
    return [Reply(ClientInfo(i, 1, 1), {"number": torch.tensor([n])}, {}) for i, n in enumerate(numbers)]


def test_what_a_method_need_not_say() -> None:
    bound = METHOD.bind(TASK)
    assert (bound.per_client, bound.personal, bound.own_model) == (False, False, False)
    for name in ("local_model", "own_part", "artifact", "phases", "replica"):
        assert getattr(bound, name) is None
    assert bound.init_client(KEY) == {}
    assert bound.metrics({}) == {}
    assert Method("plain", {}, counted).link == ("float32", "float32")


def test_the_paper_counts_four_bytes_for_every_floating_point_value_both_ways() -> None:
    received = {"w": torch.zeros(3, 2), "bits": torch.zeros(9, dtype=torch.bool)}
    message = {"w": torch.zeros(5, dtype=torch.float16), "count": torch.zeros(2, dtype=torch.int64)}
    assert dense_bytes(received, message) == METHOD.bind(TASK).paper_bytes(received, message) == 4 * (6 + 5)
    assert dense_bytes({}, {}) == 0


def test_records_cannot_be_changed_only_replaced() -> None:
    bound = METHOD.bind(TASK)
    with pytest.raises(FrozenInstanceError):
        bound.personal = True  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        METHOD.name = "other"  # type: ignore[misc]
    other = replace(bound, personal=True)
    assert other.personal
    assert not bound.personal
    with pytest.raises(TypeError):
        Bound(TASK, bound.init)  # type: ignore[call-arg,misc]


def test_a_method_is_shown_without_its_functions() -> None:
    assert repr(METHOD) == "Method(name='counted', settings={'step': 1}, link=('mask', 'float32'))"


def test_messages_are_changed_at_both_seams_and_nothing_else_is() -> None:
    seen: list[tuple[int, bytes]] = []

    def client(message: Tree, info: ClientInfo, key: Key) -> Tree:
        seen.append((info.id, key.digest))
        return {name: leaf + 10 for name, leaf in message.items()}

    def server(received: Iterable[Reply], key: Key) -> Iterable[Reply]:
        seen.append((-1, key.digest))
        return (reply for reply in received if reply.client.id != 1)

    wrapped = on_messages(METHOD, client=client, server=server)
    assert (wrapped.name, wrapped.settings, wrapped.link) == ("counted", {"step": 1}, ("mask", "float32"))
    bound = wrapped.bind(TASK, Population(4, 3))
    update = bound.client_update({}, {}, DATA, CLIENT, KEY.fold_in("client"))
    assert update.message["number"].tolist() == [12.0]
    assert (update.personal["kept"].tolist(), update.metrics) == ([1.0], {"loss": 2.0})
    new = bound.server_update({"sum": torch.zeros(1)}, iter(replies(1.0, 20.0, 300.0)), KEY.fold_in("server"))
    assert new["sum"].tolist() == [301.0]
    assert seen == [(2, KEY.fold_in("client").digest), (-1, KEY.fold_in("server").digest)]


@pytest.mark.parametrize("seam", ["client", "server"])
def test_a_seam_that_is_not_used_passes_everything_on(seam: str) -> None:
    used: dict[str, Any] = {
        "client": lambda message, client, key: {},
        "server": lambda replies, key: list(replies)[:1],
    }
    bound = on_messages(METHOD, **{seam: used[seam]}).bind(TASK)
    message = bound.client_update({}, {}, DATA, CLIENT, KEY).message
    total = bound.server_update({"sum": torch.zeros(1)}, replies(1.0, 2.0), KEY)["sum"].tolist()
    assert (message, total) == (({}, [3.0]) if seam == "client" else ({"number": torch.tensor([2.0])}, [1.0]))


def test_a_wrapper_keeps_every_optional_field() -> None:
    given: dict[str, Any] = {
        "per_client": True,
        "personal": True,
        "forget": lambda server, client: server,
        "init_client": lambda key: {"kept": torch.zeros(1)},
        "local_model": lambda received, personal: TASK.fresh(),
        "own_model": True,
        "own_part": dict,
        "artifact": lambda server: None,
        "phases": Phases(lambda server: Goal(0.5), lambda server: server),
        "replica": object(),
        "memory": Memory(merge=lambda held, received: held),
        "metrics": lambda server: {"figure": 1.0},
        "secret_draws": True,
        "client_metrics": ("loss",),
        "paper_bytes": lambda received, message: 7,
    }
    assert given.keys() == {field.name for field in fields(Bound) if field.default is not MISSING}
    rich = replace(METHOD, bind=lambda task, population=ALONE: replace(counted(task, population), **given))
    bound = on_messages(rich, client=lambda message, client, key: message).bind(TASK)
    for name, value in given.items():
        assert getattr(bound, name) is value, name


def test_seams_are_told_the_population_by_bind_alone() -> None:
    bound_to: list[Population] = []

    def bind(task: Task, population: Population = ALONE) -> Bound:
        bound_to.append(population)
        return counted(task, population)

    wrapped = on_messages(on_messages(replace(METHOD, bind=bind)))
    wrapped.bind(TASK)
    wrapped.bind(TASK, Population(9, 3))
    assert bound_to == [ALONE, Population(9, 3)]


@pytest.mark.parametrize("accuracy", [0.0, -0.1, 1.01])
def test_goals_are_accuracies(accuracy: float) -> None:
    with pytest.raises(ConfigError, match=f"a goal must be an accuracy above 0 and at most 1, got {accuracy}"):
        Goal(accuracy)
    assert (Goal(1.0).metric, Goal(0.5, "test").metric) == ("validation_accuracy", "global_accuracy")
    with pytest.raises(ConfigError, match="unknown goal_on 'train'"):
        Goal(0.5, "train")  # type: ignore[arg-type]
