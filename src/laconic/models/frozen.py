"""Weights that are never trained: signed constants from eight bytes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from laconic.core import ConfigError, Key, Tree, read_state

FrozenScale = Literal["e", "kaiming"]
SCALES: dict[FrozenScale, float] = {"e": math.e, "kaiming": math.sqrt(2.0)}
"""c in ± c/√fan_in."""
_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm)


def signed_constants(module: nn.Module, seed: int, scale: FrozenScale = "e", *, private: Collection[str] = ()) -> Tree:
    """Every weight and bias of a module (but for `private` ones) as ± c/√fan_in, the same bits on every machine.

    fan_in is that of the layer, for its bias too. Eight bytes make all of it: `seed` counts modulo 2⁶⁴. A leaf depends
    on the seed and on its own name only; bit i of the raw Philox words of its key says whether value i is positive.

    >>> signed_constants(nn.Linear(4, 1), seed=0, scale="kaiming")
    {'weight': tensor([[ 0.7071, -0.7071, -0.7071, -0.7071]]), 'bias': tensor([-0.7071])}
    """
    key = Key.from_seed(seed % 2**64).fold_in("signed constants")
    leaves: Tree = {}
    for leaf in _leaves(module, private=private):
        constant = np.float32(SCALES[scale] / math.sqrt(leaf.fan_in))
        size = leaf.parameter.numel()
        raw = key.fold_in(leaf.name).raw(-(-size // 8))
        positive = np.unpackbits(raw, count=size, bitorder="little").astype(np.bool_)
        leaves[leaf.name] = torch.from_numpy(np.where(positive, constant, -constant)).reshape(leaf.parameter.shape)
    return leaves


def check_freezable(module: nn.Module, method: str, *, private: Collection[str] = ()) -> None:
    """Refuse a module that is more than convolutions and linear layers to be learnt, and private leaves."""
    own = {leaf.name for leaf in _leaves(module, method, private)}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad and name not in private:
            raise ConfigError(
                f"{method} makes every weight anew from a seed, but {name!r} is frozen at values of its own; "
                "let it be trained, or use another method."
            )
    for name in read_state(module):
        if name not in own and name not in private:
            raise ConfigError(
                f"{method} sends bits and no values, but the model keeps the buffer {name!r}; use a model without "
                "running statistics, or make a constant buffer persistent=False."
            )
    if not own:
        raise ConfigError(f"{method} has nothing to mask: the model has no convolution and no linear layer.")


class _FrozenLeaf(NamedTuple):
    name: str
    parameter: Tensor
    fan_in: int


def _leaves(
    module: nn.Module, method: str = "signed_constants", private: Collection[str] = ()
) -> Iterator[_FrozenLeaf]:
    """Parameters by their own names, shared ones once, each with the fan-in of its layer."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for prefix, layer in module.named_modules():
        for name, parameter in layer.named_parameters(prefix=prefix, recurse=False):
            if names[id(parameter)] != name or name in private:
                continue
            if not isinstance(layer, (_ConvNd, nn.Linear)):
                raise ConfigError(_refusal(method, prefix, layer))
            # One row of the weight is what one output sees (for transposed convolutions PyTorch counts so too).
            yield _FrozenLeaf(name, parameter, max(1, math.prod(layer.weight.shape[1:])))


def _refusal(method: str, prefix: str, layer: nn.Module) -> str:
    kind = type(layer).__name__
    hint = (
        "use a model without normalisation (conv4, conv6, mlp …): signed constants need none"
        if isinstance(layer, _NORMS)
        else "use a model of convolutions and linear layers without normalisation (conv4, conv6, mlp …)"
    )
    known = "convolutions and linear layers"
    return f"{method} knows random weights for {known}, but {prefix!r} is of the type {kind}; {hint}."
