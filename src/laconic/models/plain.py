"""Networks without branches: each is one `nn.Sequential` whose layers stand in the order of the computation.

Layers are named by kind and number (`conv1`, `relu1`, `pool1`, `fc1` …), so that leaves read `conv1.weight`.
Pooling halves a side and rounds down; sizes after it are computed from the shape of the inputs.
The parameter counts in the docstrings are those of the data that the paper used.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from laconic.core import ConfigError
from laconic.models.shapes import flat_size, image_size

_NUMBERED: dict[type[nn.Module], str] = {
    nn.Conv2d: "conv",
    nn.BatchNorm2d: "bn",
    nn.ReLU: "relu",
    nn.MaxPool2d: "pool",
    nn.Dropout: "dropout",
    nn.Linear: "fc",
}
_SINGLE: dict[type[nn.Module], str] = {
    nn.AdaptiveAvgPool2d: "average",
    nn.Flatten: "flatten",
    nn.Softmax: "softmax",
}


def logistic(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Logistic regression: one linear layer; with one output and a squared loss, linear regression.

    >>> logistic((1, 28, 28), 10)
    Sequential(
      (flatten): Flatten(start_dim=1, end_dim=-1)
      (fc1): Linear(in_features=784, out_features=10, bias=True)
    )
    """
    return _named([nn.Flatten(), *_dense(flat_size("logistic", shape, classes), (), classes)])


def mlp(shape: tuple[int, ...], classes: int, *, hidden: tuple[int, ...] = (64,)) -> nn.Module:
    """Multi-layer perceptron with ReLU and the given hidden widths."""
    size = flat_size("mlp", shape, classes)
    if any(width < 1 for width in hidden):
        raise ConfigError(f"[model] mlp: hidden widths must be at least 1, got {list(hidden)}.")
    return _named([nn.Flatten(), *_dense(size, hidden, classes)])


def lg_mlp(shape: tuple[int, ...], classes: int, *, double_softmax: bool = False) -> nn.Module:
    """MLP 512-256-256-128 of LG-FedAvg (Liang et al., 2020): 633,226 parameters for MNIST.

    `double_softmax` makes it give probabilities instead of logits, on which the authors' code then takes the
    cross-entropy, with its second softmax: only to reproduce their figures.
    """
    size = flat_size("lg_mlp", shape, classes)
    layers = [nn.Flatten(), *_dense(size, (512, 256, 256, 128), classes)]
    return _named([*layers, nn.Softmax(dim=1)] if double_softmax else layers)


def lenet5_fs(shape: tuple[int, ...], classes: int, *, dropout: bool = False) -> nn.Module:
    """LeNet-5 32-64-512 of FedSparse (Louizos et al., 2021): 878,538 parameters for CIFAR-10, 608,702 for FEMNIST.

    `dropout` adds the paper's two: 0.1 after the second convolution (and its pooling), 0.3 after the first
    fully connected layer.
    """
    channels, sides = image_size("lenet5_fs", shape, classes, side=16)
    return _named(
        [
            *_lenet_convs(channels, 32, 64),
            *([nn.Dropout(0.1)] if dropout else []),
            nn.Flatten(),
            nn.Linear(64 * _lenet_pixels(sides), 512),
            nn.ReLU(),
            *([nn.Dropout(0.3)] if dropout else []),
            nn.Linear(512, classes),
        ]
    )


def lenet5(shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet-5 20-50-500 of the pruning papers (Molchanov et al., 2017): 431,080 parameters for MNIST."""
    channels, sides = image_size("lenet5", shape, classes, side=16)
    head = _dense(50 * _lenet_pixels(sides), (500,), classes)
    return _named([*_lenet_convs(channels, 20, 50), nn.Flatten(), *head])


def lg_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """CNN 6-16-120-100 of LG-FedAvg (Liang et al., 2020): 64,102 parameters for CIFAR-10."""
    channels, sides = image_size("lg_cnn", shape, classes, side=16)
    head = _dense(16 * _lenet_pixels(sides), (120, 100), classes)
    return _named([*_lenet_convs(channels, 6, 16), nn.Flatten(), *head])


def lg_adult(shape: tuple[int, ...], classes: int, *, dropout: float = 0.2) -> nn.Module:
    """MLP of LG-FedAvg's fairness experiment (Liang et al., 2020): 5,120 + 2,145 parameters for UCI Adult.

    Three layers of 32 (`fc1` to `fc3`, whose output is the representation) and three more; of two classes the first has
    the logit 0, so that one output is enough.
    """
    size = flat_size("lg_adult", shape, classes)
    if not 0 <= dropout < 1:
        raise ConfigError(f"[model] lg_adult: dropout must lie in [0, 1), got {dropout}.")
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (size, 32):
        layers += [nn.Linear(inputs, 32), nn.ReLU(), nn.Dropout(dropout)]
    layers += [nn.Linear(32, 32), nn.ReLU(), *_dense(32, (32, 32), 1 if classes == 2 else classes)]
    return _named([*layers, TwoLogits()] if classes == 2 else layers)


class TwoLogits(nn.Module):
    """One logit z as two: softmax(0, z) gives the probabilities 1 − σ(z) and σ(z)."""

    def forward(self, x: Tensor) -> Tensor:
        """(0, z)."""
        return torch.cat([torch.zeros_like(x), x], dim=1)


def conv4(shape: tuple[int, ...], classes: int, *, width: float = 1.0) -> nn.Module:
    """Conv-4 of FedPM (Isik et al., 2023): 1,933,258 parameters for MNIST, 1,942,767 for EMNIST-47.

    `width` scales every convolution and hidden layer: a quarter gives 16-16-32-32 and 64-64.
    """
    return _conv_net("conv4", shape, classes, (64, 128), width)


def conv6(shape: tuple[int, ...], classes: int, *, width: float = 1.0) -> nn.Module:
    """Conv-6 of FedPM (Isik et al., 2023): 2,262,602 parameters for CIFAR-10.

    `width` scales every convolution and hidden layer.
    """
    return _conv_net("conv6", shape, classes, (64, 128, 256), width)


def conv10(shape: tuple[int, ...], classes: int, *, width: float = 1.0) -> nn.Module:
    """Conv-10 of FedPM (Isik et al., 2023): 19,197,092 parameters for CIFAR-100.

    `width` scales every convolution and hidden layer.
    """
    return _conv_net("conv10", shape, classes, (64, 128, 256, 512, 1024), width)


def vgg_like(shape: tuple[int, ...], classes: int, *, batch_norm: bool = False) -> nn.Module:
    """Convolutions of VGG-16, global average, one linear layer: 14,719,818 parameters for 10 classes.

    The name is that of the variational-dropout paper, whose own count (18.8 M) fits no network that it describes.
    `batch_norm` puts a BatchNorm in the place of every convolution's bias (4,224 parameters more); without it,
    the outputs for different images differ by less than 1e-6 at the first weights.
    """
    channels, _ = image_size("vgg_like", shape, classes, side=32)
    layers: list[nn.Module] = []
    for depth, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(depth):
            layers += _conv3(channels, width, batch_norm=batch_norm)
            channels = width
        layers.append(nn.MaxPool2d(2))
    return _named([*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)])


def cifarnet(shape: tuple[int, ...], classes: int, *, batch_norm: bool = True) -> nn.Module:
    """M-CifarNet, eight convolutions 64²-128³-192³ and a linear layer: 1,296,074 parameters for CIFAR-10.

    The variational-dropout paper says only "CifarNet, 1.3 M"; this is the network of that name that comes nearest
    (1,294,922 parameters for MNIST). The third and the sixth convolution halve the sides. Without `batch_norm`
    each convolution has a bias instead (1,294,986).
    """
    channels, _ = image_size("cifarnet", shape, classes)
    layers: list[nn.Module] = []
    for width, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (128, 1), (192, 2), (192, 1), (192, 1)):
        layers += _conv3(channels, width, stride=stride, batch_norm=batch_norm)
        channels = width
    return _named([*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)])


def _conv_net(model: str, shape: tuple[int, ...], classes: int, widths: tuple[int, ...], width: float) -> nn.Module:
    channels, (height, breadth) = image_size(model, shape, classes, side=2 ** len(widths))
    scaled = [round(full * width) if math.isfinite(width) else 0 for full in (*widths, 256)]
    if min(scaled) < 1:
        raise ConfigError(f"[model] {model}: width must leave at least one channel in every layer, got {width}.")
    layers: list[nn.Module] = []
    for out in scaled[:-1]:
        layers += [*_conv3(channels, out), *_conv3(out, out), nn.MaxPool2d(2)]
        channels = out
    pixels = (height >> len(widths)) * (breadth >> len(widths))
    return _named([*layers, nn.Flatten(), *_dense(channels * pixels, (scaled[-1],) * 2, classes)])


def _conv3(channels: int, out: int, *, stride: int = 1, batch_norm: bool = False) -> list[nn.Module]:
    # A bias before a BatchNorm has no effect, so there is none.
    conv = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=not batch_norm)
    return [conv, nn.BatchNorm2d(out), nn.ReLU()] if batch_norm else [conv, nn.ReLU()]


def _lenet_convs(channels: int, first: int, second: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for before, after in ((channels, first), (first, second)):
        layers += [nn.Conv2d(before, after, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return layers


def _lenet_pixels(sides: tuple[int, int]) -> int:
    height, width = (((side - 4) // 2 - 4) // 2 for side in sides)
    return height * width


def _dense(size: int, hidden: Iterable[int], outputs: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(size, width), nn.ReLU()]
        size = width
    return [*layers, nn.Linear(size, outputs)]


def _named(layers: Iterable[nn.Module]) -> nn.Module:
    count: Counter[str] = Counter()
    named: OrderedDict[str, nn.Module] = OrderedDict()
    for layer in layers:
        kind = type(layer)
        if kind in _NUMBERED:
            count[_NUMBERED[kind]] += 1
            named[f"{_NUMBERED[kind]}{count[_NUMBERED[kind]]}"] = layer
        else:
            named["logits" if isinstance(layer, TwoLogits) else _SINGLE[kind]] = layer
    return nn.Sequential(named)
