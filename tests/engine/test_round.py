"""What the server accepts, and how predictors are evaluated."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import laconic as lc
from laconic.codecs import Direction, parse, seal, unseal
from laconic.core import ClientInfo, Key, Part, PayloadError, Task, accuracy
from laconic.engine import Agreement, Link, Score, client_round, evaluate, open_reply, receive, send, to_everyone
from laconic.testing import small_task

CLIENT = ClientInfo(3, 1, 0)


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fingerprint_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


reader: Any = _loaded(Path(__file__).parents[1] / "golden" / "reader.py")


@pytest.fixture(scope="module")
def update(toys: Any) -> tuple[Agreement, dict[str, torch.Tensor], bytes]:
    """An agreement, a broadcast and an honest reply of client 3 in round 1."""
    simulation = toys.simulation()
    agreement = simulation.agreement
    frame, (received, _) = send(agreement, simulation.state.server, to_everyone(1))
    assert all(torch.equal(received[n], v) for n, v in receive(agreement, frame, to_everyone(1)).received.items())
    done = client_round(agreement, received, CLIENT, {}, {}, simulation.clients.client(3))
    return agreement, received, done.frame


def resealed(agreement: Agreement, frame: bytes, payload: bytes | None = None, **changes: Any) -> bytes:
    """The frame of a client that lies, with an honest checksum."""
    header, honest = unseal(
        frame,
        direction=Direction.UP,
        codec=agreement.link.up.id,
        round=1,
        client=3,
        fingerprint=agreement.fingerprint,
    )
    return seal(replace(header, **changes), honest if payload is None else payload)


def refused(agreement: Agreement, frame: bytes, received: Any, client: ClientInfo = CLIENT) -> str:
    with pytest.raises(PayloadError) as caught:
        open_reply(agreement, frame, received, client)
    assert (caught.value.client, caught.value.round) == (client.id, client.round)
    assert str(caught.value).startswith(f"client {client.id}, round {client.round}: ")
    return caught.value.reason


def test_an_honest_reply_is_opened(update: Any, toys: Any) -> None:
    agreement, received, frame = update
    reply = open_reply(agreement, frame, received, CLIENT)
    assert reply.client == replace(CLIENT, examples=len(toys.federation().client(3).train))
    assert {n: v.shape for n, v in reply.message.items()} == {n: v.shape for n, v in received.items()}


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("weight", {"weight": 0}),
        ("weight", {"weight": 10_000_001}),
        ("weight", {"weight": 2**32 - 1}),
        ("round", {"round": 2}),
        ("client", {"client": 4}),
        ("codec", {"codec": 2}),
        ("fingerprint", {"fingerprint": bytes(8)}),
        ("direction", {"direction": 0}),
    ],
)
def test_a_reply_that_lies_about_itself_is_refused(update: Any, reason: str, changes: dict[str, Any]) -> None:
    agreement, received, frame = update
    assert refused(agreement, resealed(agreement, frame, **changes), received) == reason


def test_the_largest_weight_is_accepted(update: Any) -> None:
    agreement, received, frame = update
    heavy = resealed(agreement, frame, weight=agreement.max_examples)
    assert open_reply(agreement, heavy, received, CLIENT).client.examples == agreement.max_examples


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 7, 17])
def test_values_that_are_not_finite_are_refused(update: Any, value: float, place: int) -> None:
    agreement, received, frame = update
    values = torch.frombuffer(bytearray(frame[40:]), dtype=torch.float32).clone()
    values[place] = value
    assert refused(agreement, resealed(agreement, frame, values.numpy().tobytes()), received) == "non_finite"


@pytest.mark.parametrize("cut", range(0, 112, 3))
def test_a_cut_frame_is_refused(update: Any, cut: int) -> None:
    agreement, received, frame = update
    assert len(frame) == 40 + 4 * 18
    assert refused(agreement, frame[:cut], received) == "truncated"


def test_a_message_for_another_model_is_refused(update: Any) -> None:
    agreement, received, frame = update
    assert refused(agreement, resealed(agreement, frame, frame[40:-4]), received) == "truncated"
    assert refused(agreement, resealed(agreement, frame, frame[40:] + bytes(4)), received) == "trailing"


def test_a_late_or_replayed_reply_is_refused(update: Any) -> None:
    agreement, received, frame = update
    assert refused(agreement, frame, received, ClientInfo(3, 2, 0)) == "round"
    assert refused(agreement, frame, received, ClientInfo(4, 1, 0)) == "client"


@pytest.mark.parametrize("change", ["model", "method", "up", "down", "seed"])
def test_the_fingerprint_tells_runs_apart(toys: Any, change: str) -> None:
    settings: dict[str, dict[str, Any]] = {
        "model": {"task": Task(lambda: nn.Linear(5, 3, bias=False))},
        "method": {"method": toys.hooked(name="other")},
        "up": {"up": "float16"},
        "down": {"down": "bfloat16"},
        "seed": {"seed": 1},
    }
    one, other = toys.simulation().agreement, toys.simulation(**settings[change]).agreement
    assert one.fingerprint == toys.simulation().agreement.fingerprint
    assert one.fingerprint != other.fingerprint


METHODS: dict[str, tuple[Any, str, str]] = {
    "fedavg": (lc.fedavg(), "float32", "float32"),
    "fedopt": (lc.fedopt(server=lc.ServerOptimizer("adagrad", lr=0.1), lr=0.3), "ef(topk:fraction=0.1)", "eden:bits=4"),
    "fedpm": (lc.fedpm(), "mask", "mask"),
    "fedsparse": (lc.fedsparse(lambda0=1e-7), "eden:bits=2", "float16"),
    "lg_fedavg": (lc.lg_fedavg(goal=0.9, private=("0.*",)), "float32", "float32"),
    "a wrapper": (lc.KeepLocal(lc.fedprox(mu=1), ("0.*",)), "drive", "float32"),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", [0, 7])
def test_the_fingerprint_is_the_one_of_the_specification(name: str, seed: int) -> None:
    """As a reader that was written from docs/wire.md makes it, of nothing but plain words."""
    method, up, down = METHODS[name]
    task, link = small_task(), Link(parse(up), parse(down))
    agreement = Agreement(method.bind(task), link, Key.from_seed(seed), method.name, method.settings)
    spec = {n: reader.Leaf(tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")) for n, leaf in task.spec.items()}
    agreed = {
        "model": reader.describe(spec),
        "method": method.name,
        "settings": json.loads(json.dumps(method.settings)),
        "up": link.up.text,
        "down": link.down.text,
        "key": Key.from_seed(seed).digest,
    }
    assert agreement.fingerprint == reader.fingerprint(**agreed)
    assert agreement.fingerprint != reader.fingerprint(**{**agreed, "settings": {}})


def test_the_fingerprint_does_not_depend_on_the_order_of_settings_or_how_they_were_given() -> None:
    task, link = small_task(), Link(parse("float32"), parse("float32"))

    def of(method: Any, settings: Any = None) -> bytes:
        key = Key.from_seed(0)
        return Agreement(method.bind(task), link, key, method.name, settings or method.settings).fingerprint

    assert of(lc.fedprox(mu=0.5, lr=0.1)) == of(lc.fedprox(solver=lc.Solver(lr=0.1), mu=0.5))
    turned = dict(reversed(lc.fedprox(mu=0.5, lr=0.1).settings.items()))
    assert of(lc.fedprox(mu=0.5, lr=0.1), turned) == of(lc.fedprox(mu=0.5, lr=0.1))
    assert of(lc.fedprox(mu=1)) == of(lc.fedprox(mu=1.0)), "as a file says it"
    assert of(lc.fedprox(mu=0.5)) != of(lc.fedprox(mu=0.25))


def test_scores_add_up() -> None:
    one, other = Score(2, {"loss": 1.0, "accuracy": 2.0}), Score(3, {"loss": 0.5, "accuracy": 1.0})
    assert (one + other).means() == {"loss": 0.3, "accuracy": 0.6}
    assert (Score(0, {}) + one) == one
    assert (one + Score(0, {})) == one
    assert Score(0, {"loss": 0.0}).means() == {}


@pytest.mark.parametrize("examples", [1, 499, 500, 501, 1203])
def test_an_evaluation_equals_a_direct_one(examples: int) -> None:
    generator = Key.from_seed(examples).torch()
    x, y = torch.randn(2000, 4, generator=generator), torch.randint(3, (2000,), generator=generator)
    index = torch.randperm(2000, generator=generator)[:examples]
    model = nn.Sequential(nn.Dropout(0.9), nn.Linear(4, 3)).train()
    task = Task(lambda: model, metrics={"accuracy": accuracy, "top2": top2})
    score = evaluate(task, model, Part(x, y, index))
    assert model.training, "the predictor is left in the mode that it was in"
    with torch.no_grad():
        output = model.eval()(x[index])
    target = y[index]
    assert score.examples == examples
    assert score.means() == {
        "loss": pytest.approx(float(F.cross_entropy(output, target)), rel=1e-5),
        "accuracy": pytest.approx(float((output.argmax(1) == target).double().mean())),
        "top2": pytest.approx(float((output.topk(2).indices == target[:, None]).any(1).double().mean())),
    }


def top2(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.topk(2).indices == target[:, None]).any(1).float()


def test_no_examples_no_score(toys: Any) -> None:
    empty = Part(torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    score = evaluate(toys.simulation().method.task, nn.Linear(5, 3), empty)
    assert (score.examples, score.means()) == (0, {})


def test_a_local_update_leaves_its_inputs_alone(toys: Any) -> None:
    simulation = toys.simulation(up="ef(signsgd)")
    agreement, data = simulation.agreement, simulation.clients.client(2)
    _, (received, _) = send(agreement, simulation.state.server, to_everyone(1))
    state = agreement.link.up.init_state(agreement.method.message_spec(received))
    before = [{n: v.clone() for n, v in tree.items()} for tree in (received, state, simulation.state.server)]
    client_round(agreement, received, ClientInfo(2, 1, 0), {}, state, data)
    for tree, old in zip((received, state, simulation.state.server), before, strict=True):
        assert all(torch.equal(tree[name], old[name]) for name in old)
