"""Layers in their quickest order: the same names, outputs and gradients, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from laconic.core import Key, channels_last
from laconic.models import lenet5_fs, lg_cnn, mlp, resnet20_gn
from laconic.models.order import in_quick_order


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("build", [lenet5_fs, lg_cnn])
def test_no_bit_changes(build: Callable[..., nn.Module], precision: str) -> None:
    module = build((3, 32, 32), 10)
    quick = in_quick_order(module)
    kinds = [type(layer) for layer in quick]
    assert (nn.MaxPool2d, nn.ReLU) in itertools.pairwise(kinds)
    assert (nn.ReLU, nn.MaxPool2d) not in itertools.pairwise(kinds)
    assert dict(quick.named_parameters()).keys() == dict(module.named_parameters()).keys()
    x = torch.randn(6, 3, 32, 32, generator=Key.from_seed(0).torch())
    x[0], x[1, :, :9] = 0.0, -5.0  # windows whose values are all the same
    weights = list(module.parameters())

    def gradients(network: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            output = network(images)
        loss = F.cross_entropy(output.float(), torch.arange(6) % 10)
        return [output.detach(), *torch.autograd.grad(loss, weights)]

    for images in (x, channels_last(x)):
        assert all(torch.equal(a, b) for a, b in zip(gradients(module, images), gradients(quick, images), strict=True))


class Own(nn.Sequential):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def listened_to() -> nn.Module:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2))
    module[1].register_forward_hook(lambda layer, inputs, output: output + 1)
    return module


@pytest.mark.parametrize(
    "build",
    [
        lambda: mlp((1, 8, 8), 10),
        lambda: resnet20_gn((3, 32, 32), 10),
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.AvgPool2d(2)),
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.MaxPool2d(2)),
        lambda: Own(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2)),
        listened_to,
    ],
)
def test_what_has_no_such_order_is_left_alone(build: Callable[[], nn.Module]) -> None:
    module = build()
    assert in_quick_order(module) is module
