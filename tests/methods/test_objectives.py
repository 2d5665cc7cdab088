"""Local objectives: what they add to the loss, who gets which gradient, and that they stay on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.methods.conftest import inside
from torch import nn

from laconic.core import ClientData, ClientInfo, ConfigError, DataError, Key, Part, Task, Tree, num_values
from laconic.methods import Adversary, Autoencoder, Jigsaw, KeepLocal, Opponent, Solver, fedavg, lg_fedavg
from laconic.methods.objectives import Contest, adversary_net, orders_of, representation, shuffled
from laconic.models import models
from laconic.models.initial import initialize
from laconic.testing import check_method, small_task

KEY = Key.from_seed(0)
SOLVER = Solver(lr=0.1, local_epochs=1, batch_size=4)
CLIENT = ClientInfo(0, 1, 0)


def images() -> ClientData:
    rng = torch.Generator().manual_seed(0)
    x, y = torch.rand(12, 1, 4, 4, generator=rng), torch.arange(12) % 3
    marks = (torch.rand(12, 2, generator=rng) > 0.5).float()
    return ClientData(Part(x, y, torch.arange(8), marks), Part(x, y, torch.arange(8, 12), marks))


def image_task() -> Task:
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3))

    return Task(build)


def bound(objective: Any, **settings: Any) -> Any:
    return KeepLocal(fedavg(solver=SOLVER), ("1.*",), objective=objective, solver=SOLVER, **settings).bind(image_task())


def turn(method: Any, personal: Tree | None = None, data: ClientData | None = None) -> Any:
    received = method.broadcast(method.init(KEY), CLIENT, KEY)
    return method.client_update(received, personal or {}, data or images(), CLIENT, KEY)


def contest(weight: float = 0.5, **opponent: Any) -> tuple[Task, Contest, ClientData]:
    task, data = image_task(), images()
    task.load(task.init(KEY))
    net = adversary_net(6, 2, 8)
    initialize(net, KEY)
    return task, Contest(task, "1", net, weight, lr=0.1, opponent=Opponent(**opponent)), data


# --- the adversary (§9.5 e) ------------------------------------------------------------------------------------------


def test_the_adversary_gets_the_gradient_of_its_own_loss() -> None:
    task, side, data = contest()
    x, marks = data.train.tensors()[0], data.train.protected[data.train.index]  # type: ignore[index]
    module: Any = task.module
    h = module[1](x.flatten(1)).detach()
    loss = 0.5 * F.binary_cross_entropy_with_logits(side.net(h), marks, reduction="none").mean(0).sum()
    expected = torch.autograd.grad(loss, list(side.net.parameters()))
    for got, wanted in zip(side.adversary_gradients(h, marks), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    assert all(float(wanted.abs().max()) > 0 for wanted in expected)


def test_the_model_gets_the_task_minus_the_adversary() -> None:
    task, side, data = contest(weight=0.7)
    x, y = data.train.tensors()
    marks = data.train.protected[data.train.index]  # type: ignore[index]
    module: Any = task.module
    weights = list(module.parameters())
    got = torch.autograd.grad(side.loss(module, x, y, marks), weights)
    task_loss = torch.autograd.grad(F.cross_entropy(module(x), y), weights)
    adversary = side.adversary_loss(module[1](x.flatten(1)), marks)
    against = torch.autograd.grad(adversary, weights, allow_unused=True, materialize_grads=True)
    for i, gradient in enumerate(got):
        torch.testing.assert_close(gradient, task_loss[i] - 0.7 * against[i])
    assert float(against[0].abs().max()) > 0  # ℓ gets something of the adversary
    assert float(against[2].abs().max()) == 0  # g does not: it is behind h


def test_a_step_of_the_adversary_leaves_the_model_alone_and_lowers_its_loss() -> None:
    task, side, data = contest(weight=1.0)
    x, marks = data.train.tensors()[0], data.train.protected[data.train.index]  # type: ignore[index]
    before = [p.detach().clone() for p in task.module.parameters()]
    losses = []
    for _ in range(20):
        losses.append(side.adversary_loss(representation(task.module, "1", x), marks).item())
        side.before_step(x, marks)
    assert losses[-1] < losses[0]
    assert all(torch.equal(p, old) for p, old in zip(task.module.parameters(), before, strict=True))


def test_a_stronger_opponent_learns_more_from_a_mini_batch() -> None:
    after = {}
    for name, opponent in {
        "one step": {},
        "ten steps": {"steps": 10},
        "adam": {"steps": 10, "optimizer": "adam", "lr": 0.01, "standardize": True},
    }.items():
        task, side, data = contest(1.0, **opponent)
        x, marks = data.train.tensors()[0], data.train.protected[data.train.index]  # type: ignore[index]
        side.before_step(x, marks)
        after[name] = side.adversary_loss(representation(task.module, "1", x), marks).item()
    assert after["ten steps"] < after["one step"]
    assert after["adam"] < after["one step"]


def test_what_is_standardised_has_no_scale() -> None:
    _, side, data = contest(standardize=True)
    marks = data.train.protected[data.train.index]  # type: ignore[index]
    h = torch.randn(len(marks), 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        side.adversary_loss(h, marks), side.adversary_loss(1000 * h + 5, marks), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize(
    ("opponent", "said"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"lr": -1.0}, "lr must be positive"),
        ({"optimizer": "x"}, "adam"),
        ({"weight_decay": -1.0}, "weight_decay must be finite and ≥ 0, got -1"),
        ({"attributes": (-1,)}, r"attributes must be different numbers ≥ 0, got \[-1\]"),
        ({"attributes": (1, 1)}, r"attributes must be different numbers ≥ 0, got \[1, 1\]"),
    ],
)
def test_opponents_that_are_refused(opponent: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Opponent(**opponent)


def test_an_adversary_of_no_weight_changes_nothing_that_is_sent() -> None:
    free, fair = turn(bound(None)), turn(bound(Adversary(weight=0.0)))
    for name, leaf in free.message.items():
        torch.testing.assert_close(leaf, fair.message[name], atol=0, rtol=0)
    hard = turn(bound(Adversary(weight=5.0)))
    assert any(not torch.equal(hard.message[name], leaf) for name, leaf in free.message.items())


def test_without_protected_attributes_there_is_no_adversary() -> None:
    data = images()
    bare = ClientData(Part(data.train.x, data.train.y, data.train.index), data.test)
    with pytest.raises(DataError, match="an adversary needs protected attributes"):
        turn(bound(Adversary()), data=bare)


def test_an_adversary_guesses_the_attributes_that_it_is_asked() -> None:
    task, data = image_task(), images()
    task.load(task.init(KEY))
    x, marks = data.train.tensors()[0], data.train.protected[data.train.index]  # type: ignore[index]
    h = representation(task.module, "1", x)
    net = adversary_net(6, 1, 8)
    side = Contest(task, "1", net, 1.0, lr=0.1, opponent=Opponent(attributes=(1,)))
    expected = F.binary_cross_entropy_with_logits(net(h), marks[:, 1:])
    torch.testing.assert_close(side.adversary_loss(h, marks), expected)
    personal = turn(bound(Adversary(weight=1.0, opponent=Opponent(attributes=(1,))))).personal
    assert personal["aux/6.weight"].shape[0] == 1
    with pytest.raises(ConfigError, match=r"adversary\.attributes: there is no attribute 2; the data have 0 to 1"):
        turn(bound(Adversary(weight=1.0, opponent=Opponent(attributes=(2,)))))


def test_a_stronger_lambda_is_no_weaker_decay() -> None:
    """Steps of Adam depend on neither the scale of L_a nor that of its decay."""
    after = []
    for weight in (0.1, 10.0):
        _, side, data = contest(weight, steps=20, optimizer="adam", lr=0.01, weight_decay=0.1)
        side.before_step(data.train.tensors()[0], data.train.protected[data.train.index])  # type: ignore[index]
        after.append([leaf.detach() for leaf in side.net.parameters()])
    for weak, strong in zip(*after, strict=True):
        torch.testing.assert_close(weak, strong, rtol=1e-3, atol=1e-4)


def test_weight_decay_keeps_an_adversary_small() -> None:
    def size(decay: float) -> float:
        opponent = Opponent(steps=20, optimizer="adam", lr=0.01, weight_decay=decay)
        personal = turn(bound(Adversary(weight=1.0, opponent=opponent))).personal
        return sum(float(leaf.square().sum()) for name, leaf in personal.items() if name.startswith("aux/"))

    assert size(1.0) < 0.5 * size(0.0)


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", [Autoencoder(), Jigsaw(), Adversary(weight=1.0)])
def test_what_an_objective_learns_stays_on_the_device(objective: Any) -> None:
    method = bound(objective)
    update = turn(method)
    assert list(update.message) == ["3.weight", "3.bias"]
    own = {name for name in update.personal if name.startswith("aux/")}
    assert own
    again = turn(method, update.personal)
    assert any(not torch.equal(again.personal[name], update.personal[name]) for name in own)
    assert list(again.personal) == list(update.personal)


@pytest.mark.parametrize("objective", [Autoencoder(weight=50.0), Jigsaw(weight=50.0)])
def test_an_objective_moves_the_private_part(objective: Any) -> None:
    plain, with_it = turn(bound(None)), turn(bound(objective))
    assert not torch.equal(plain.personal["local/1.weight"], with_it.personal["local/1.weight"])


def test_an_autoencoder_learns_to_rebuild() -> None:
    method = bound(Autoencoder(weight=1.0, hidden=32))
    personal: Tree = {}
    data = images()

    def error(personal: Tree) -> float:
        h = data.train.tensors()[0].flatten(1) @ personal["local/1.weight"].T + personal["local/1.bias"]
        h = (h @ personal["aux/0.weight"].T + personal["aux/0.bias"]).relu()
        rebuilt = h @ personal["aux/2.weight"].T + personal["aux/2.bias"]
        return float(F.mse_loss(rebuilt, data.train.tensors()[0].flatten(1)))

    errors = []
    for _ in range(30):
        personal = turn(method, personal).personal
        errors.append(error(personal))
    assert errors[-1] < 0.7 * errors[0]


def test_an_objective_of_no_weight_is_no_objective() -> None:
    plain, with_it = turn(bound(None)), turn(bound(Autoencoder(weight=0.0)))
    for name, leaf in plain.message.items():
        torch.testing.assert_close(leaf, with_it.message[name], atol=0, rtol=0)


def test_jigsaw_needs_images_that_can_be_cut() -> None:
    x, y = torch.rand(6, 1, 3, 4), torch.zeros(6, dtype=torch.int64)
    odd = ClientData(Part.whole(x, y), Part.whole(x, y))
    task = Task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 3)))
    method = KeepLocal(fedavg(solver=SOLVER), ("1.*",), objective=Jigsaw(), solver=SOLVER).bind(task)
    with pytest.raises(ConfigError, match=r"jigsaw needs images whose sides are even, got inputs of shape \(1, 3, 4\)"):
        turn(method, data=odd)
    with pytest.raises(ConfigError, match="permutations must lie between 2 and 24, got 25"):
        lg_fedavg(objective="jigsaw", permutations=25)


def test_a_puzzle_is_the_same_pixels_in_another_order() -> None:
    image = torch.rand(5, 3, 6, 4)
    orders = torch.tensor(orders_of(24))
    assert len({tuple(order) for order in orders.tolist()}) == 24
    assert torch.equal(shuffled(image, orders[[0] * 5]), image)
    mixed = shuffled(image, orders[[1, 5, 9, 17, 23]])
    assert torch.equal(mixed.flatten(2).sort(dim=2).values, image.flatten(2).sort(dim=2).values)
    first = orders[5].tolist()[0]
    row, column = divmod(first, 2)
    one = shuffled(image, orders[[5] * 5])
    assert torch.equal(one[:, :, :3, :2], image[:, :, 3 * row : 3 * row + 3, 2 * column : 2 * column + 2])


def test_an_autoencoder_keeps_the_laws() -> None:
    method = KeepLocal(fedavg(solver=SOLVER), ("0.*",), objective=Autoencoder(hidden=4), solver=SOLVER)
    check_method(method, task=small_task(), workers=0)


def test_the_networks_of_the_fairness_experiment() -> None:
    task = Task(lambda: models.build("lg_adult", {}, given=((93,), 2)))
    method: Any = inside(lg_fedavg(global_layers=3, objective="adversary").bind(task))
    assert num_values({name: task.spec[name] for name in method.private}) == 5_120
    assert num_values(method.message_spec({})) == 2_145
    assert method._tap == "fc3"
    outputs = task.module(torch.zeros(2, 93))
    assert outputs.shape == (2, 2)
    assert torch.equal(outputs[:, 0], torch.zeros(2))


def test_of_a_layer_that_gives_several_things_the_first_is_the_representation() -> None:
    """An LSTM gives its outputs and its states."""
    lstm = torch.nn.LSTM(3, 4, batch_first=True)
    x = torch.randn(2, 5, 3)
    assert torch.equal(representation(torch.nn.Sequential(lstm), "0", x), lstm(x)[0])

    class Words(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"x": x}

    with pytest.raises(ConfigError, match="the layer '0' gives a dict"):
        representation(torch.nn.Sequential(Words()), "0", x)
