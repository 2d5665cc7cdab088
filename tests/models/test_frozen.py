from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from laconic.core import ConfigError, tree_sha256
from laconic.models import conv4, mlp, models, resnet20_gn, signed_constants
from laconic.models.frozen import check_freezable


def test_golden_constants() -> None:
    constants = signed_constants(mlp((4,), 3, hidden=(5,)), 2**64 - 1)
    assert tree_sha256(constants) == "2b9e157a7693a1f32d931a6ff843098a16547bdead1d32941cf418aa9f66abce"


@pytest.mark.parametrize(("scale", "c"), [("e", math.e), ("kaiming", math.sqrt(2))])
def test_every_magnitude_is_c_over_the_root_of_fan_in(scale: str, c: float) -> None:
    net = conv4((1, 28, 28), 10, width=0.25)
    constants = signed_constants(net, 5, scale)  # type: ignore[arg-type]
    assert {name: tuple(leaf.shape) for name, leaf in constants.items()} == {
        name: tuple(leaf.shape) for name, leaf in net.named_parameters()
    }
    for name, leaf in constants.items():
        weight = net.get_submodule(name.split(".")[0]).weight
        assert isinstance(weight, torch.Tensor)
        magnitude = torch.tensor(c / math.sqrt(weight[0].numel()), dtype=torch.float32)
        assert bool((leaf.abs() == magnitude).all()), name
        positive, size = int((leaf > 0).sum()), leaf.numel()
        assert abs(positive - size / 2) <= 4 * math.sqrt(size / 4), name


def test_a_leaf_depends_on_the_seed_and_its_name_only() -> None:
    small, large = (signed_constants(mlp((4,), 3, hidden=hidden), 9) for hidden in ((5,), (5, 6)))
    assert torch.equal(small["fc1.weight"], large["fc1.weight"])
    assert not torch.equal(small["fc1.weight"], signed_constants(mlp((4,), 3, hidden=(5,)), 10)["fc1.weight"])
    signs = [leaf.flatten()[:3].sign().tolist() for leaf in signed_constants(conv4((1, 28, 28), 10), 9).values()]
    assert len({tuple(sign) for sign in signs}) > 3


def test_eight_bytes_count_modulo_2_to_the_64() -> None:
    net = nn.Linear(10, 10)
    assert tree_sha256(signed_constants(net, -1)) == tree_sha256(signed_constants(net, 2**64 - 1))


def test_what_the_module_holds_does_not_matter_and_is_left_alone() -> None:
    net = nn.Linear(10, 10)
    before = net.weight.clone()
    first = tree_sha256(signed_constants(net, 1))
    assert torch.equal(net.weight, before)
    nn.init.zeros_(net.weight)
    assert tree_sha256(signed_constants(net, 1)) == first


def test_shared_weights_are_made_once() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    net[2].weight = net[0].weight  # type: ignore[union-attr]
    assert list(signed_constants(net, 0)) == ["0.weight", "0.bias", "2.bias"]
    check_freezable(net, "fedpm")


def test_transposed_and_grouped_convolutions() -> None:
    net = nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.ConvTranspose2d(4, 6, 3))
    constants = signed_constants(net, 0)
    assert float(constants["0.bias"].abs()[0]) == pytest.approx(math.e / math.sqrt(2 * 3))
    assert float(constants["1.weight"].abs().max()) == pytest.approx(math.e / math.sqrt(6 * 9))


class Odd(nn.Module):
    """A model with one part that has no place in it."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.odd = part


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (nn.BatchNorm2d(4), "but 'odd' is of the type BatchNorm2d; use a model without running statistics"),
        (nn.Sequential(nn.Bilinear(4, 4, 2)), "but 'odd.0' is of the type Bilinear; keep it on the devices"),
        (nn.PReLU(), "but 'odd' is of the type PReLU; keep it on the devices"),
        (nn.BatchNorm1d(4, affine=False), "but the model keeps the buffer 'odd.running_mean'; use a model without"),
        (nn.Linear(4, 4).requires_grad_(False), "'odd.weight' is frozen at values of its own; let it be trained"),
    ],
)
def test_other_parts_are_refused_by_name(part: nn.Module, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_freezable(Odd(part), "fedpm")
    assert str(caught.value).startswith("fedpm ")
    assert says in str(caught.value)
    assert str(caught.value).endswith(".")


def test_what_has_no_parameters_does_not_matter() -> None:
    check_freezable(Odd(nn.Sequential(nn.Dropout(), nn.LayerNorm(4, elementwise_affine=False))), "fedpm")
    with pytest.raises(ConfigError, match="nothing to mask"):
        check_freezable(nn.ReLU(), "fedpm")


def test_the_catalogues_networks_without_normalisation_are_fit_for_it() -> None:
    for name in ("logistic", "mlp", "lg_mlp", "lenet5_fs", "lenet5", "lg_cnn", "conv4", "conv6"):
        check_freezable(models[name]((1, 32, 32), 10), "fedpm")
    check_freezable(resnet20_gn((3, 32, 32), 10), "fedpm")
    check_freezable(models["char_lstm"]((80,), 90), "fedpm")
    with pytest.raises(ConfigError, match="BatchNorm"):
        check_freezable(models["resnet18"]((3, 32, 32), 10), "fedpm")


def test_sequence_layers_have_the_fan_in_that_their_outputs_see() -> None:
    parts = {"embed": nn.Embedding(5, 4), "lstm": nn.LSTM(4, 3, 2), "gru": nn.GRU(4, 6)}
    constants = signed_constants(nn.ModuleDict({**parts, "attend": nn.MultiheadAttention(4, 2)}), 0, "kaiming")
    sizes = {name: float(leaf.abs()[(0,) * leaf.dim()]) for name, leaf in constants.items()}
    for name, fan_in in {
        "embed.weight": 1,
        "lstm.weight_hh_l0": 7,
        "gru.bias_ih_l0": 10,
        "attend.in_proj_weight": 4,
    }.items():
        assert sizes[name] == pytest.approx(math.sqrt(2 / fan_in)), name


def test_normalisation_scales_by_one_and_shifts_by_nothing() -> None:
    constants = signed_constants(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4)), 0)
    assert bool((constants["1.weight"] == 1).all())
    assert not bool(constants["2.bias"].any())


def test_a_weight_of_two_layers_has_the_larger_fan_in() -> None:
    embed, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embed.weight
    assert float(signed_constants(nn.Sequential(embed, head), 0, "kaiming")["0.weight"].abs()[0, 0]) == pytest.approx(
        math.sqrt(2 / 4)
    )
