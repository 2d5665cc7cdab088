"""What clients say: their metrics, their errors, and what a codec of one's own makes of their bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import laconic as lc
from laconic.codecs import parse
from laconic.codecs.wire import CodecId
from laconic.core import (
    Bound,
    ClientData,
    ClientInfo,
    Key,
    Method,
    Population,
    Shared,
    Spec,
    Task,
    Tree,
    Update,
    printable,
)
from laconic.engine import Link, Record, Schedule, Simulation
from laconic.methods import methods
from laconic.progress import troubles
from laconic.testing import Byzantine, small_federation, small_task

SHORT = {"lr": 0.1, "local_epochs": 1, "batch_size": 10}


def records(method: Method, *, up: Any = None, workers: int = 0) -> list[Record]:
    link = Link(up or parse("float32"), parse("float32"))
    schedule = Schedule(rounds=1, cohort=6)
    return list(Simulation(method, small_task(), small_federation(), link, schedule, seed=0, workers=workers))


def saying(method: Method, client: int, words: dict[str, float]) -> Method:
    """The method with a client that says something else of its training."""

    def bind(task: Task, population: Population) -> Bound:
        bound = method.bind(task, population)

        def update(received: Tree, personal: Tree, data: ClientData, info: ClientInfo, key: Key) -> Update:
            made = bound.client_update(received, personal, data, info, key)
            return dataclasses.replace(made, metrics={**made.metrics, **words}) if info.id == client else made

        return dataclasses.replace(bound, client_update=update)

    return dataclasses.replace(method, bind=bind)


@pytest.mark.parametrize("name", list(methods))
def test_every_method_of_the_catalogue_says_what_its_clients_may_say(name: str) -> None:
    assert methods.build(name, {}).bind(small_task(), Population(6, 6)).client_metrics is not None


@pytest.mark.parametrize(
    "words", [{"validation_accuracy": 1.0}, {"x" * 1000: 1.0}, {"train_loss": 1e30}, {"train_loss": math.inf}]
)
def test_what_a_client_should_not_say_is_not_heard(words: dict[str, float]) -> None:
    honest = records(lc.fedavg(**SHORT))[0]
    heard = records(saying(lc.fedavg(**SHORT), 2, words))[0]
    assert heard.clients.keys() == {"train_loss"}
    assert heard["replies"] == 6
    assert 0 < heard.clients["train_loss"] < 2 * honest.clients["train_loss"]


def test_one_loss_that_is_no_number_does_not_hide_the_others() -> None:
    heard = records(saying(lc.fedavg(**SHORT), 2, {"train_loss": math.nan}))[0]
    assert math.isfinite(heard.clients["train_loss"])


def test_a_method_that_does_not_say_hears_all() -> None:
    method = lc.fedavg(**SHORT)
    free = dataclasses.replace(
        method, bind=lambda task, population: dataclasses.replace(method.bind(task, population), client_metrics=None)
    )
    assert records(saying(free, 2, {"mood": 1.0}))[0].clients.keys() == {"train_loss", "mood"}


# --- terminals -------------------------------------------------------------------------------------------------------


def test_control_characters_of_a_client_reach_no_terminal() -> None:
    def rude(message: Tree) -> Tree:
        raise RuntimeError("\x1b[2J\x1b]0;owned\x07 \x9b31m")

    (record,) = records(Byzantine(lc.fedavg(**SHORT), {1}, rude), workers=1)
    (line,) = troubles(record)
    assert "owned" in line
    assert line.isprintable()
    assert str(lc.PayloadError("node_error", "\x1b[31m\nno")).isprintable()


def test_what_is_printable_stays() -> None:
    assert printable("größe ≤ 3 – 字") == "größe ≤ 3 – 字"
    assert printable("a\tb\n") == "a\\tb\\n"


# --- a codec of one's own --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Careless:
    """A codec that decodes whatever its author liked."""

    made: Callable[[Tree], Tree]
    text: str = "careless"
    id: int = CodecId.CUSTOM

    def init_state(self, spec: Spec) -> Tree:
        return {}

    def encode(self, tree: Tree, shared: Shared, state: Tree) -> tuple[bytes, Tree]:
        return parse("float32").encode(tree, shared, state)

    def decode(self, blob: bytes, spec: Spec, shared: Shared) -> Tree:
        return self.made(parse("float32").decode(blob, spec, shared))


def nan_at_the_end(tree: Tree) -> Tree:
    last = list(tree)[-1]
    leaf = tree[last].clone()
    leaf.view(-1)[-1] = math.nan
    return {**tree, last: leaf}


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (nan_at_the_end, "huge"),
        (lambda tree: {name: leaf.double() for name, leaf in tree.items()}, "decoded"),
        (lambda tree: {name: leaf.reshape(-1) for name, leaf in tree.items()}, "decoded"),
        (lambda tree: {name: leaf[..., :1] for name, leaf in tree.items()}, "decoded"),
        (lambda tree: dict(list(tree.items())[1:]), "decoded"),
        (lambda tree: {**tree, "more": torch.zeros(1)}, "decoded"),
        (lambda tree: dict(reversed(tree.items())), "decoded"),
        (lambda tree: None, "codec_error"),
    ],
)
def test_what_a_codec_of_ones_own_decodes_is_checked(made: Any, reason: str) -> None:
    (record,) = records(lc.fedavg(**SHORT), up=Careless(made))
    assert {rejection.reason for rejection in record.rejections} == {reason}
    assert record.abandoned == "no reply was accepted"
