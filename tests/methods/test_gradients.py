"""Gradients by hand are autograd's, bit for bit; where they are not for certain, they are not taken."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from laconic.core import Key, Part, Task
from laconic.methods.gradients import Chain
from laconic.methods.solvers import Solver, solve


def chain(*widths: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for number, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        layers += [nn.ReLU()] * (number > 0) + [nn.Linear(inputs, outputs)]
    return nn.Sequential(*layers)


def examples(width: int, count: int, classes: int) -> Part:
    key = Key.from_seed(3)
    return Part.whole(torch.randn(count, width, generator=key.torch()), torch.arange(count) % classes)


@pytest.mark.parametrize("widths", [(5, 3), (7, 4, 3), (64, 64, 10), (784, 200, 10), (30, 20, 20, 20, 5)])
@pytest.mark.parametrize("count", [1, 3, 10, 33])
def test_gradients_are_autograds_bit_for_bit(widths: tuple[int, ...], count: int) -> None:
    module = chain(*widths)
    part = examples(widths[0], count, widths[-1])
    weights = list(module.parameters())
    expected = F.cross_entropy(module(part.x), part.y)
    by_autograd = torch.autograd.grad(expected, weights)
    for wanted in (slice(None), slice(None, None, -1), slice(1, 2)):
        found = Chain.of(Task(lambda: module), module, part, weights[wanted])
        assert found is not None
        with torch.no_grad():
            loss, gradients = found.gradients(part.x, part.y)
        assert torch.equal(loss, expected.detach())
        assert all(torch.equal(a, b) for a, b in zip(gradients, by_autograd[wanted], strict=True))
        assert not any(gradient.requires_grad for gradient in gradients)


def mean_cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_fit_by_hand_is_the_fit_by_autograd(optimizer: str) -> None:
    part, ended = examples(12, 50, 4), []
    for loss in (F.cross_entropy, mean_cross_entropy):  # the second is none that the chain knows
        task = Task(lambda: chain(12, 9, 4), loss=loss)
        task.load(task.init(Key.from_seed(0)))
        solver = Solver(optimizer=optimizer, lr=0.1, local_epochs=3, batch_size=8, clip_norm=1.0, weight_decay=1e-3)
        solved = solve(task, part, solver, round=1, key=Key.from_seed(1))
        ended.append((solved, [leaf.clone() for leaf in task.state().values()]))
    (one, weights), (other, others) = ended
    assert one == other
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def hooked() -> nn.Module:
    module = chain(6, 5, 3)
    module[1].register_forward_hook(lambda layer, inputs, output: output * 2)
    return module


def tied() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU(), layer)


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3)),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Linear(5, 3)),
        lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)),
        lambda: nn.Sequential(nn.Flatten(), Scaled(6, 5), nn.ReLU(), nn.Linear(5, 3)),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3), nn.ReLU()),
        lambda: nn.Sequential(nn.Flatten()),
        hooked,
        tied,
    ],
)
def test_what_is_no_plain_chain_is_left_to_autograd(build: Callable[[], nn.Module]) -> None:
    module = build()
    assert Chain.of(Task(lambda: module), module, examples(6, 4, 3), []) is None


def test_other_losses_targets_and_precisions_are_left_to_autograd() -> None:
    module, part = chain(6, 5, 3), examples(6, 4, 3)
    assert Chain.of(Task(lambda: module, loss=mean_cross_entropy), module, part, []) is None
    assert Chain.of(Task(lambda: module, precision="bfloat16"), module, part, []) is None
    soft = Part.whole(part.x, torch.full((4, 3), 1 / 3))
    assert Chain.of(Task(lambda: module), module, soft, []) is None
    assert Chain.of(Task(lambda: module), module, Part.whole(part.x.double(), part.y), []) is None
