"""Variational dropout by module surgery: every weight of a linear or convolutional layer becomes a Gaussian.

| symbol | here |
|---|---|
| w ~ N(θ, σ²) = N(θ, α θ²) | a weight; θ is the layer's own `weight`, log σ² stands beside it as `log_sigma2` |
| log α = log σ² − log(θ² + 1e-8), in [−8, 8] | noise against signal; dropout with p = α / (1 + α) has as much |
| KL(log α) | from the log-uniform prior 1/|w|, up to a constant |

A forward pass draws not the weights but what they make of an input a (the local reparametrisation): an output is
N(aθ, a²σ²), drawn for every example by itself. Predictions use θ where log α is at most a threshold, and 0 elsewhere.

Molchanov, Ashukha & Vetrov, "Variational dropout sparsifies deep neural networks", 2017.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from laconic.core import ConfigError, Tree
from laconic.models.anatomy import is_dense, tied_layers

_K1, _K2, _K3 = 0.63576, 1.87320, 1.48695
_SMALL = 1e-8
LOWEST, HIGHEST = -8.0, 8.0
"""What log α is clipped to."""
SIGMA = "log_sigma2"
"""The name of a layer's log σ²."""

_ORDINARY = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.PReLU,
)


def log_alpha(theta: Tensor, log_sigma2: Tensor) -> Tensor:
    """log α, clipped; finite at θ = 0.

    >>> log_alpha(torch.tensor([1.0, 0.0]), torch.tensor([-3.0, -3.0]))
    tensor([-3.,  8.])
    """
    return (log_sigma2 - (theta * theta).add_(_SMALL).log_()).clamp_(LOWEST, HIGHEST)


def kl(log_alpha: Tensor) -> Tensor:
    """KL(q ‖ log-uniform) of each weight, by the approximation of Molchanov et al.: within 0.0094 nats on [−6, 4].

    >>> kl(torch.tensor([-4.0, 3.0]))
    tensor([2.6342, 0.0254])
    """
    return _K1 * torch.sigmoid(-(_K2 + _K3 * log_alpha)) + 0.5 * nn.functional.softplus(-log_alpha)


def kl_gradient(theta: Tensor, log_sigma2: Tensor) -> tuple[Tensor, Tensor]:
    """∂KL/∂θ and ∂KL/∂log σ² in closed form; 0 where log α is clipped.

    >>> by_theta, by_sigma = kl_gradient(torch.tensor([0.1]), torch.tensor([-4.0]))
    >>> bool(by_theta > 0), bool(by_sigma < 0)       # smaller weights and more noise are what the prior wants
    (True, True)
    """
    square = (theta * theta).add_(_SMALL)
    free = log_sigma2 - square.log()
    gate = torch.sigmoid(_K2 + _K3 * free)
    slope = gate * (gate - 1) * (_K1 * _K3) - 0.5 * torch.sigmoid(-free)
    slope *= (free > LOWEST) & (free < HIGHEST)
    return slope * theta / square * -2, slope


@dataclass
class Noise:
    """Where the layers of one module draw from. Without a generator nothing is drawn: outputs are means."""

    generator: torch.Generator | None = None

    def drawn(self, mean: Tensor, variance: Tensor) -> Tensor:
        """N(mean, variance), element by element."""
        if self.generator is None:
            return mean
        eps = torch.randn(mean.shape, generator=self.generator, device=mean.device, dtype=mean.dtype)
        return torch.addcmul(mean, (variance + _SMALL).sqrt(), eps)


class VariationalLinear(nn.Linear):
    """A linear layer of Gaussian weights."""

    log_sigma2: nn.Parameter
    noise: Noise

    def forward(self, input: Tensor) -> Tensor:
        """One draw of the outputs for every example."""
        mean = nn.functional.linear(input, self.weight, self.bias)
        if self.noise.generator is None:
            return mean
        return self.noise.drawn(mean, nn.functional.linear(input * input, self.log_sigma2.exp()))


class VariationalConv1d(nn.Conv1d):
    """A one-dimensional convolution of Gaussian weights."""

    log_sigma2: nn.Parameter
    noise: Noise

    def forward(self, input: Tensor) -> Tensor:
        """One draw of the outputs for every example."""
        return _convolved(self, input)


class VariationalConv2d(nn.Conv2d):
    """A two-dimensional convolution of Gaussian weights."""

    log_sigma2: nn.Parameter
    noise: Noise

    def forward(self, input: Tensor) -> Tensor:
        """One draw of the outputs for every example."""
        return _convolved(self, input)


def _convolved(layer: VariationalConv1d | VariationalConv2d, input: Tensor) -> Tensor:
    mean: Tensor = layer._conv_forward(input, layer.weight, layer.bias)
    if layer.noise.generator is None:
        return mean
    return layer.noise.drawn(mean, layer._conv_forward(input * input, layer.log_sigma2.exp(), None))


_FORMS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: VariationalLinear,
    nn.Conv1d: VariationalConv1d,
    nn.Conv2d: VariationalConv2d,
}


@dataclass(frozen=True, eq=False)
class Variational:
    """A module in its variational form: its own leaves keep their names, `layer.log_sigma2` comes beside them.

    `weights` are the names of θ (`layer.weight`), in the module's order; `noise` is what all of its layers draw
    from. `whole` are the layers that have no variational form, each with the reason.
    """

    module: nn.Module
    weights: tuple[str, ...]
    noise: Noise
    whole: Mapping[str, str]


def sigma_name(weight: str) -> str:
    """The leaf of log σ² that belongs to a weight.

    >>> sigma_name("fc.weight")
    'fc.log_sigma2'
    """
    return weight.removesuffix("weight") + SIGMA


def variational(module: nn.Module, *, first_log_sigma2: float = -10.0, dense: Collection[str] = ()) -> Variational:
    """Give every Linear, Conv1d and Conv2d layer of a module its log σ², in place. Frozen layers stay as they are.

    So do leaves that match a pattern of `dense`, biases and normalisation layers, and layers that have no variational
    form: they travel whole.

    >>> form = variational(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.BatchNorm1d(3)))
    >>> form.weights, [name for name, _ in form.module.named_parameters()]
    (('0.weight',), ['0.weight', '0.bias', '0.log_sigma2', '2.weight', '2.bias'])
    """
    noise = Noise()
    weights: list[str] = []
    whole: dict[str, str] = {}
    tied = tied_layers(module)
    for name, layer in module.named_modules():
        own = dict(layer.named_parameters(recurse=False))
        paths = {short: f"{name}.{short}".removeprefix(".") for short in own}
        if not any(parameter.requires_grad and not is_dense(paths[short], dense) for short, parameter in own.items()):
            continue
        form, weight = _FORMS.get(type(layer)), own.get("weight")
        if form is None or weight is None or name in tied:
            if not isinstance(layer, _ORDINARY):
                whole[name] = f"it is a {type(layer).__name__}" + (" whose weight is used elsewhere" * (name in tied))
                if form is not None and weight is None:
                    whole[name] = "its weight is computed"
            continue
        if not weight.requires_grad or is_dense(paths["weight"], dense):
            continue
        # The class is exchanged, not the layer: whatever else refers to the layer goes on doing so.
        layer.__class__ = form
        layer.register_parameter(SIGMA, nn.Parameter(torch.full_like(weight, first_log_sigma2)))
        layer.noise = noise
        weights.append(paths["weight"])
    if not weights:
        raise ConfigError("vardrop needs a model with Linear, Conv1d or Conv2d layers that are trained; this has none.")
    return Variational(module, tuple(weights), noise, whole)


def pruned(state: Tree, keep: Tree) -> Tree:
    """A model's state with 0 where `keep` says so; leaves without an entry stay whole.

    >>> pruned({"w": torch.ones(2), "b": torch.ones(1)}, {"w": torch.tensor([True, False])})
    {'w': tensor([1., 0.]), 'b': tensor([1.])}
    """
    return {name: leaf * keep[name] if name in keep else leaf for name, leaf in state.items()}


def dropout_rate(log_alpha: float) -> float:
    """p = α / (1 + α): how often binary dropout with the same noise would drop the weight.

    >>> round(dropout_rate(3.0), 3)
    0.953
    """
    return 1 / (1 + math.exp(-log_alpha))


def noise_of(module: nn.Module) -> Noise:
    """What the layers of a module in its variational form draw from: one source for all."""
    return next(noise for layer in module.modules() if isinstance(noise := getattr(layer, "noise", None), Noise))
