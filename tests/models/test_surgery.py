"""A model with units removed computes what the masked model computes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from laconic.core import ConfigError, Key, read_state, write_state
from laconic.models import (
    cifarnet,
    initialize,
    lenet5_fs,
    mlp,
    num_parameters,
    resnet18,
    resnet20_gn,
)
from laconic.models.anatomy import dissect
from laconic.models.groups import Groups, find_groups
from laconic.models.surgery import CountedGroupNorm, Cut, Spread, multiply_adds, plan, slice_tree, sliced


class PreActivation(nn.Module):
    """A residual network whose norms stand on the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv1d(2, 6, 3, padding=1), nn.GroupNorm(3, 6)
        self.inner, self.outer = nn.Conv1d(6, 8, 3, padding=1), nn.Conv1d(8, 6, 3, padding=1)
        self.last, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.outer(torch.relu(self.inner(torch.relu(self.norm(x)))))
        return self.head(torch.relu(self.last(x)).mean(2))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lenet5_fs": (lambda: lenet5_fs((3, 32, 32), 10), (3, 32, 32)),
    "resnet20_gn": (lambda: resnet20_gn((3, 32, 32), 100), (3, 32, 32)),
    "resnet20_gn of 8 groups": (lambda: resnet20_gn((3, 16, 16), 10, groups=8), (3, 16, 16)),
    "resnet18": (lambda: resnet18((3, 32, 32), 10), (3, 32, 32)),
    "cifarnet": (lambda: cifarnet((3, 16, 16), 10), (3, 16, 16)),
    "mlp": (lambda: mlp((8, 8), 10, hidden=(32, 16)), (8, 8)),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 2)),
        (6,),
    ),
    "norm after flatten": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)),
        (1, 4, 4),
    ),
    "pre-activation": (PreActivation, (2, 9)),
}


def _random_net(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    build, shape = NETS[name]
    net = build()
    initialize(net, Key.from_seed(0))
    random = Key.from_seed(1).torch()
    for leaf_name, leaf in read_state(net).items():
        if "norm" in leaf_name or "bn" in leaf_name or leaf.dim() == 1:  # norms must not be the identity
            leaf.add_(0.5 * torch.rand(leaf.shape, generator=random))
    return net.eval(), shape


def _random_gates(groups: Groups, rate: float, seed: int) -> Tensor:
    opened = torch.rand(groups.count, generator=Key.from_seed(seed).torch()) >= rate
    for layer in groups.layers:
        opened[layer.first] = True
    return opened


@pytest.mark.parametrize(
    ("name", "rate"),
    [(name, rate) for name in NETS for rate in ((0.5,) if name in ("resnet18", "cifarnet") else (0.1, 0.5, 0.9))],
)
def test_masked_and_sliced_outputs_are_equal(name: str, rate: float) -> None:
    net, shape = _random_net(name)
    groups = find_groups(net)
    opened = _random_gates(groups, rate, seed=int(10 * rate))
    masked = copy.deepcopy(net)
    write_state(masked, groups.masked(read_state(net), opened))
    assert groups.anatomy is not None
    small = sliced(net, groups.anatomy, plan(groups.anatomy, groups.open_units(opened)))
    x = torch.randn(3, *shape, generator=Key.from_seed(2).torch())
    with torch.no_grad():
        assert torch.allclose(masked(x), small(x), rtol=1e-5, atol=1e-5)
    if not bool(opened.all()):
        assert num_parameters(small) < num_parameters(net)
        assert multiply_adds(small, shape) < multiply_adds(net, shape)


def test_a_sliced_net_trains_like_the_masked_one() -> None:
    net, shape = _random_net("resnet20_gn")
    groups = find_groups(net)
    opened = _random_gates(groups, 0.4, seed=7)
    masked = copy.deepcopy(net)
    write_state(masked, groups.masked(read_state(net), opened))
    assert groups.anatomy is not None
    chosen = plan(groups.anatomy, groups.open_units(opened))
    small = sliced(net, groups.anatomy, chosen)
    x = torch.randn(2, *shape, generator=Key.from_seed(2).torch())
    large_gradient = torch.autograd.grad(masked(x).square().mean(), masked.get_parameter("layer1.0.conv1.weight"))[0]
    small_gradient = torch.autograd.grad(small(x).square().mean(), small.get_parameter("layer1.0.conv1.weight"))[0]
    assert torch.allclose(chosen.cuts["layer1.0.conv1.weight"].take(large_gradient), small_gradient, atol=1e-6)


def test_nothing_closed_changes_nothing() -> None:
    net, shape = _random_net("resnet20_gn")
    anatomy = dissect(net)
    same = sliced(net, anatomy, plan(anatomy, torch.ones(anatomy.units, dtype=torch.bool)))
    x = torch.randn(2, *shape)
    assert torch.equal(net(x), same(x))
    assert list(read_state(same)) == list(read_state(net))


def test_group_norm_stays_one_while_groups_are_whole() -> None:
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GroupNorm(4, 8), nn.Flatten(), nn.Linear(8, 2))
    anatomy = dissect(net)
    units = torch.ones(10, dtype=torch.bool)
    units[2:4] = False
    small = sliced(net, anatomy, plan(anatomy, units))
    assert isinstance(small[1], nn.GroupNorm)  # type: ignore[index]
    assert small[1].num_groups == 3  # type: ignore[index]
    units[5] = False
    assert isinstance(sliced(net, anatomy, plan(anatomy, units))[1], CountedGroupNorm)  # type: ignore[index]


def test_a_layer_is_sliced_though_its_stream_is_not() -> None:
    net, _ = _random_net("resnet20_gn")
    groups = find_groups(net)
    opened = torch.ones(groups.count, dtype=torch.bool)
    layer = next(layer for layer in groups.layers if layer.name == "layer1.1.conv2")
    opened[layer.first : layer.first + 9] = False
    assert groups.anatomy is not None
    small = sliced(net, groups.anatomy, plan(groups.anatomy, groups.open_units(opened)))
    assert small.get_submodule("layer1.1.conv2").out_channels == 7  # type: ignore[comparison-overlap]
    assert small.get_submodule("layer1.2.conv1").in_channels == 16  # type: ignore[comparison-overlap]
    assert [type(module) for module in small.modules()].count(Spread) == 1


def test_a_dead_layer_is_refused() -> None:
    net = mlp((4,), 2, hidden=(3,))
    anatomy = dissect(net)
    with pytest.raises(ConfigError, match="'fc1'"):
        plan(anatomy, torch.tensor([False] * 3 + [True] * 2))


def test_cuts_take_and_add_back() -> None:
    leaf = torch.arange(24.0).view(4, 3, 2)
    for cut in (
        Cut(),
        Cut(torch.tensor([0, 3])),
        Cut(None, torch.tensor([2])),
        Cut(torch.tensor([1, 2]), torch.tensor([0, 2])),
    ):
        part = cut.take(leaf)
        assert tuple(part.shape) == cut.shape((4, 3, 2))
        back = torch.zeros_like(leaf)
        cut.add_to(back, part, alpha=2.0)
        assert torch.equal(cut.take(back), 2 * part)
        assert float(back.sum()) == 2 * float(part.sum())
    assert torch.equal(slice_tree({"w": leaf}, {"w": Cut(torch.tensor([1]))})["w"], leaf[1:2])


def test_multiply_adds_of_lenet() -> None:
    net = lenet5_fs((3, 32, 32), 10)
    expected = 28 * 28 * 32 * 75 + 10 * 10 * 64 * 800 + 1600 * 512 + 512 * 10
    assert multiply_adds(net, (3, 32, 32)) == expected
