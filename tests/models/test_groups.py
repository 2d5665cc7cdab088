"""Which units, channels and columns belong to a gate."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.core import ConfigError, read_state
from laconic.models import lenet5_fs, logistic, mlp, resnet18, resnet20_gn
from laconic.models.anatomy import dissect
from laconic.models.groups import find_groups


class Functional(nn.Module):
    """A user's model: functions instead of layers, two branches that are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(1, 3, 3, padding=1)
        self.right = nn.Conv2d(1, 5, 3, padding=1)
        self.head = nn.Linear(8 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([F.relu(self.left(x)), self.right(x).relu()], dim=1)
        return self.head(F.max_pool2d(both, 2).view(x.size(0), -1))


class Doing(nn.Module):
    """A hidden layer, something in between, an output layer."""

    def __init__(self, between: object) -> None:
        super().__init__()
        self.fc1, self.fc2, self.between = nn.Linear(6, 4), nn.Linear(4, 2), between

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.between(self.fc1(x)))  # type: ignore[operator]


def test_lenet_has_a_gate_per_filter_and_hidden_neuron() -> None:
    groups = find_groups(lenet5_fs((3, 32, 32), 10, dropout=True))
    assert [(layer.name, layer.count, layer.weight.size) for layer in groups.layers] == [
        ("conv1", 32, 75),
        ("conv2", 64, 800),
        ("fc1", 512, 1600),
    ]
    assert groups.count == 608
    assert groups.free == ("fc2.weight", "fc2.bias")
    assert all(layer.bias is not None for layer in groups.layers)
    assert groups.followers == ()


def test_through_flatten_a_channel_is_a_square_of_columns() -> None:
    conv1, conv2, fc1, fc2 = dissect(lenet5_fs((3, 32, 32), 10)).layers
    assert conv1.inputs is None
    assert (conv2.inputs, conv2.columns) == (conv1.outputs, 1)
    assert (fc1.inputs, fc1.columns) == (conv2.outputs, 25)
    assert (fc2.inputs, fc2.columns, fc2.output) == (fc1.outputs, 1, True)


def test_layers_of_a_residual_stream_share_its_slots() -> None:
    anatomy = dissect(resnet20_gn((3, 32, 32), 10))
    outputs = {layer.name: layer.outputs for layer in anatomy.layers}
    inputs = {layer.name: layer.inputs for layer in anatomy.layers}
    assert outputs["conv1"] == outputs["layer1.0.conv2"] == outputs["layer1.2.conv2"] == inputs["layer1.1.conv1"]
    assert outputs["layer2.0.conv2"] == outputs["layer2.2.conv2"] == inputs["layer3.0.conv1"]
    assert not set(outputs["layer1.0.conv1"]) & set(outputs["layer1.0.conv2"])
    assert inputs["layer1.0.conv2"] == outputs["layer1.0.conv1"]
    assert outputs["layer3.2.conv2"] == inputs["fc"]
    # Old channels of a later stage are written by the earlier stages too, through the shortcuts; new ones are not.
    first = {layer.name: layer.first for layer in anatomy.layers}
    old, new = outputs["layer2.0.conv2"][3], outputs["layer2.0.conv2"][20]
    assert first["conv1"] + 3 in anatomy.slot_sources[old]
    assert anatomy.slot_sources[new] == {first[f"layer2.{i}.conv2"] + 20 for i in range(3)}


def test_channels_of_a_norm_go_with_the_units_before_it() -> None:
    groups = find_groups(resnet20_gn((3, 32, 32), 10))
    assert groups.count == 16 + 6 * 16 + 6 * 32 + 6 * 64
    assert len(groups.followers) == 2 * 19
    opened = torch.ones(groups.count, dtype=torch.bool)
    layer = next(layer for layer in groups.layers if layer.name == "layer2.1.conv2")
    opened[layer.first + 5] = False
    closed = {name for name, piece in groups.pieces.items() if not bool(piece.present(opened).all())}
    assert closed == {"layer2.1.conv2.weight", "layer2.1.norm2.weight", "layer2.1.norm2.bias"}
    assert not groups.pieces["layer2.1.norm2.bias"].present(opened)[5]


def test_projections_belong_to_the_stream_that_they_write() -> None:
    anatomy = dissect(resnet18((3, 32, 32), 10))
    outputs = {layer.name: layer.outputs for layer in anatomy.layers}
    assert outputs["layer2.0.downsample.0"] == outputs["layer2.0.conv2"] == outputs["layer2.1.conv2"]


def test_a_norm_on_a_stream_keeps_a_channel_while_anything_writes_it() -> None:
    class PreActivation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.conv = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.norm, self.head = nn.GroupNorm(2, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            x = torch.relu(self.norm(x + self.conv(x)))
            return self.head(x.mean((2, 3)))

    groups = find_groups(PreActivation())
    scale = groups.pieces["norm.weight"]
    opened = torch.tensor([True, False, False, True, True, True, False, False])
    assert scale.present(opened).tolist() == [True, True, False, True]


def test_functions_and_branches_are_followed() -> None:
    net = Functional()
    groups = find_groups(net)
    assert [(layer.name, layer.count) for layer in groups.layers] == [("left", 3), ("right", 5)]
    left, right, head = dissect(net).layers
    assert head.inputs == left.outputs + right.outputs
    assert head.columns == 16


def test_unstructured_gates_are_one_per_weight() -> None:
    net = mlp((4, 4), 3, hidden=(5,))
    groups = find_groups(net, structured=False)
    assert groups.count == 16 * 5
    assert groups.free == ("fc1.bias", "fc2.weight", "fc2.bias")
    assert torch.equal(groups.norms(read_state(net)), net.fc1.weight.detach().abs().reshape(-1))  # type: ignore[union-attr]
    assert find_groups(net, structured=False, gate_output=True).count == 16 * 5 + 5 * 3


def test_output_layers_are_gated_by_input() -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 4, 2))
    groups = find_groups(net, gate_output=True)
    assert groups.count == 3 + 3
    weight = net[3].weight.detach()
    expected = weight.view(2, 3, 4).transpose(0, 1).reshape(3, -1).norm(dim=1)
    assert torch.allclose(groups.norms(read_state(net))[3:], expected)
    opened = torch.tensor([True, True, True, True, False, True])
    masked = groups.masked(read_state(net), opened)["3.weight"]
    assert not masked.view(2, 3, 4)[:, 1].any()
    assert torch.equal(masked.view(2, 3, 4)[:, 0], weight.view(2, 3, 4)[:, 0])


def test_what_is_taken_can_be_put_back() -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 4, 2))
    groups = find_groups(net, gate_output=True)
    opened = torch.tensor([True, False, True, False, True, True])
    state = read_state(net)
    masked = groups.masked(state, opened)
    for name, piece in groups.pieces.items():
        present = piece.present(opened)
        sent = piece.taken(state[name], present)
        assert sent.shape == (2 * piece.size,)
        assert torch.equal(piece.put(sent, present), masked[name])
    assert set(groups.free) == {"4.bias"}


@pytest.mark.parametrize(
    ("build", "layer", "reason"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4), nn.Linear(4, 2)), "0", "'1' is a LSTM"),
        (lambda: nn.Sequential(nn.ConvTranspose2d(1, 4, 3), nn.Conv2d(4, 2, 3)), "0", "it is a ConvTranspose2d"),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 2, 3)),
            "1",
            "groups = 4",
        ),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2)), "0", "'1' is a Sigmoid"),
        (
            lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, elementwise_affine=False), nn.Linear(4, 2)),
            *("0", "LayerNorm"),
        ),
        (lambda: Doing(lambda x: x + 1), "fc1", "'add'"),
        (lambda: Doing(torch.exp), "fc1", "'exp'"),
        (lambda: Doing(lambda x: x.view(-1, 4)), "fc1", "'view'"),
    ],
)
def test_what_cannot_be_followed_stays_whole(build: Callable[[], nn.Module], layer: str, reason: str) -> None:
    whole = dissect(build()).whole
    assert reason in whole[layer]


def test_a_model_that_cannot_be_traced_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be traced"):
        find_groups(Doing(lambda x: x if x.sum() > 0 else -x))


def test_the_rest_of_a_model_is_gated_all_the_same() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))
    groups = find_groups(net)
    assert [layer.name for layer in groups.layers] == ["2"]
    assert groups.free == ("0.weight", "0.bias", "4.weight", "4.bias")


def test_dense_layers_have_no_gates() -> None:
    net = mlp((4,), 3, hidden=(5, 6))
    assert [layer.name for layer in find_groups(net, dense=("fc1.*",)).layers] == ["fc2"]
    assert [layer.name for layer in find_groups(net, structured=False, dense=("fc2.*",)).layers] == ["fc1"]
    with pytest.raises(ConfigError, match=r"'fc1' stays whole: it is among dense\. Set structured"):
        find_groups(net, dense=("*",))


def test_the_same_layers_behind_the_output_layer_are_welcome() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2), nn.Sigmoid())
    assert find_groups(net).count == 4


@pytest.mark.parametrize("net", [logistic((4,), 3), nn.Linear(4, 3)])
def test_a_model_without_gateable_layers_is_refused(net: nn.Module) -> None:
    with pytest.raises(ConfigError, match="no gateable layer"):
        find_groups(net)


def test_tied_and_repeated_layers_stay_whole() -> None:
    tied = nn.Sequential(
        nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)
    )
    tied[2].weight = tied[0].weight
    groups = find_groups(tied)
    assert [layer.name for layer in groups.layers] == ["4"]
    layer, before = nn.Linear(4, 4), nn.Linear(4, 4)
    net = nn.Sequential(
        before, nn.ReLU(), layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)
    )
    assert set(dissect(net).whole) == {"0", "2"}
    assert [layer.name for layer in find_groups(net).layers] == ["6"]


def test_columns_of_a_flattened_sequence_are_not_mistaken_for_channels() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 5, 2))
    assert "0" in dissect(net).whole
