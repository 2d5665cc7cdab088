"""Residual networks: a `nn.Sequential` of stages, each a `nn.Sequential` of blocks.

A block adds to a stream: `relu(residual(x) + shortcut(x))`. Both kinds of block spell out their two convolutions,
and neither has anything hidden, since masks, gates and variational layers are put into them later.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from laconic.core import ConfigError
from laconic.models.shapes import image_size


class PadShortcut(nn.Module):
    """A shortcut without parameters: every `stride`-th pixel, and zeros for the channels that are new.

    Old channels keep their numbers, so that channel 3 of the stream is channel 3 in every later stage.
    """

    def __init__(self, channels: int, out: int, *, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.new_channels = out - channels

    def forward(self, x: Tensor) -> Tensor:
        """Subsample and pad."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"stride={self.stride}, new_channels={self.new_channels}"


class GroupNormBlock(nn.Module):
    """Two 3×3 convolutions with GroupNorm around a shortcut without parameters."""

    def __init__(self, channels: int, out: int, *, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, out)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, out)
        self.shortcut = _pad_or_identity(channels, out, stride)
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """The stream after this block."""
        hidden = self.relu1(self.norm1(self.conv1(x)))
        out: Tensor = self.relu2(self.norm2(self.conv2(hidden)) + self.shortcut(x))
        return out


class BatchNormBlock(nn.Module):
    """Two 3×3 convolutions with BatchNorm; a 1×1 convolution is the shortcut where the shape changes.

    Leaves are named as torchvision names them, so that its published weights fit.
    """

    def __init__(self, channels: int, out: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = _projection_or_identity(channels, out, stride)
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """The stream after this block."""
        hidden = self.relu1(self.bn1(self.conv1(x)))
        out: Tensor = self.relu2(self.bn2(self.conv2(hidden)) + self.downsample(x))
        return out


def resnet20_gn(shape: tuple[int, ...], classes: int, *, groups: int = 2) -> nn.Module:
    """ResNet-20 with GroupNorm and shortcuts without parameters (FedSparse): 275,572 parameters for CIFAR-100.

    For 10 classes 269,722. `groups` is the number of groups of every GroupNorm; the paper doesn't say.
    """
    channels, _ = image_size("resnet20_gn", shape, classes)
    if groups < 1 or 16 % groups:
        raise ConfigError(f"[model] resnet20_gn: groups must divide 16, got {groups}.")
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv1"] = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
    layers["norm1"] = nn.GroupNorm(groups, 16)
    layers["relu1"] = nn.ReLU()
    stream = 16
    for stage, width in enumerate((16, 32, 64), start=1):
        blocks = []
        for index in range(3):
            stride = 2 if index == 0 and stage > 1 else 1
            blocks.append(GroupNormBlock(stream, width, stride=stride, groups=groups))
            stream = width
        layers[f"layer{stage}"] = nn.Sequential(*blocks)
    return nn.Sequential(_with_head(layers, stream, classes))


def resnet18(shape: tuple[int, ...], classes: int, *, stem: Literal["imagenet", "cifar"] = "imagenet") -> nn.Module:
    """ResNet-18 (He et al., 2016) with torchvision's layout and names: 11,689,512 parameters for 1000 classes.

    For 10 classes 11,181,642. The stem "imagenet" (7×7, stride 2, pooling) leaves one pixel of a 32×32 image at
    the end, "cifar" (3×3, no pooling) sixteen. BatchNorm cannot train on one example with one pixel: with
    the first stem and small images, every mini-batch needs two examples or more.
    """
    channels, _ = image_size("resnet18", shape, classes)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if stem == "imagenet":
        layers["conv1"] = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    elif stem == "cifar":
        layers["conv1"] = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    else:
        raise ConfigError(f"[model] resnet18: stem must be 'imagenet' or 'cifar', got {stem!r}.")
    layers["bn1"] = nn.BatchNorm2d(64)
    layers["relu1"] = nn.ReLU()
    if stem == "imagenet":
        layers["pool1"] = nn.MaxPool2d(3, stride=2, padding=1)
    stream = 64
    for stage, width in enumerate((64, 128, 256, 512), start=1):
        blocks = []
        for index in range(2):
            stride = 2 if index == 0 and stage > 1 else 1
            blocks.append(BatchNormBlock(stream, width, stride=stride))
            stream = width
        layers[f"layer{stage}"] = nn.Sequential(*blocks)
    return nn.Sequential(_with_head(layers, stream, classes))


def _with_head(layers: OrderedDict[str, nn.Module], channels: int, classes: int) -> OrderedDict[str, nn.Module]:
    layers["average"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(channels, classes)
    return layers


def _pad_or_identity(channels: int, out: int, stride: int) -> nn.Module:
    return nn.Identity() if channels == out and stride == 1 else PadShortcut(channels, out, stride=stride)


def _projection_or_identity(channels: int, out: int, stride: int) -> nn.Module:
    if channels == out and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))
