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
_GAINS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def signed_constants(module: nn.Module, seed: int, scale: FrozenScale = "e", *, private: Collection[str] = ()) -> Tree:
    """Every weight and bias of a module (but for `private` ones) as ± c/√fan_in, the same bits on every machine.

    fan_in is that of the layer, for its bias too (1 for an embedding, inputs and hidden size together for a recurrent
    layer). Normalisation layers scale by 1 and shift by 0: their masks choose channels. Eight bytes make all of it:
    `seed` counts modulo 2⁶⁴. A leaf depends on the seed and on its own name only; bit i of the raw Philox words of its
    key says whether value i is positive.

    >>> signed_constants(nn.Linear(4, 1), seed=0, scale="kaiming")
    {'weight': tensor([[ 0.7071, -0.7071, -0.7071, -0.7071]]), 'bias': tensor([-0.7071])}
    """
    key = Key.from_seed(seed % 2**64).fold_in("signed constants")
    leaves: Tree = {}
    for leaf in _leaves(module, private=private):
        if leaf.gain is not None:
            leaves[leaf.name] = torch.full_like(leaf.parameter, float(leaf.gain == "weight"), device="cpu")
            continue
        constant = np.float32(SCALES[scale] / math.sqrt(leaf.fan_in))
        size = leaf.parameter.numel()
        raw = key.fold_in(leaf.name).raw(-(-size // 8))
        positive = np.unpackbits(raw, count=size, bitorder="little").astype(np.bool_)
        leaves[leaf.name] = torch.from_numpy(np.where(positive, constant, -constant)).reshape(leaf.parameter.shape)
    return leaves


def check_freezable(module: nn.Module, method: str, *, private: Collection[str] = ()) -> None:
    """Refuse a module with layers that there are no random weights for, with frozen weights or running statistics."""
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
        raise ConfigError(f"{method} has nothing to mask: the model has no layer with weights.")


class _FrozenLeaf(NamedTuple):
    name: str
    parameter: Tensor
    fan_in: int
    gain: str | None = None
    """What a normalisation layer calls it."""


def _leaves(
    module: nn.Module, method: str = "signed_constants", private: Collection[str] = ()
) -> Iterator[_FrozenLeaf]:
    """Parameters by their own names, shared ones once, each with the largest fan-in of the layers that use it."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: dict[str, _FrozenLeaf] = {}
    for prefix, layer in module.named_modules():
        for short, parameter in layer.named_parameters(recurse=False):
            name = names[id(parameter)]
            if name in private:
                continue
            fan_in = _fan_in(layer)
            if fan_in is None:
                raise ConfigError(_refusal(method, prefix, layer))
            known = found.get(name)
            scaled = isinstance(layer, _GAINS)
            found[name] = _FrozenLeaf(
                name, parameter, max(fan_in, known.fan_in if known else 1), short if scaled else None
            )
    yield from found.values()


def _fan_in(layer: nn.Module) -> int | None:
    """How many weights one output of a layer sees; `None` for layers of other kinds."""
    if isinstance(layer, (_ConvNd, nn.Linear)):
        # One row of the weight is what one output sees (for transposed convolutions PyTorch counts so too).
        return max(1, math.prod(layer.weight.shape[1:]))
    if isinstance(layer, nn.RNNBase):  # a gate sees the input and the last hidden state
        return layer.input_size + layer.hidden_size
    if isinstance(layer, nn.MultiheadAttention):
        return int(layer.embed_dim)
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag, *_GAINS)):  # a row is looked up, a channel is scaled
        return 1
    return None


def _refusal(method: str, prefix: str, layer: nn.Module) -> str:
    kind = type(layer).__name__
    hint = (
        "use a model without running statistics (GroupNorm and LayerNorm have none)"
        if isinstance(layer, _NormBase)
        else "keep it on the devices (lc.KeepLocal), or use another method"
    )
    known = "convolutions, linear and recurrent layers, attention, embeddings, GroupNorm and LayerNorm"
    return f"{method} knows random weights for {known}, but {prefix!r} is of the type {kind}; {hint}."
