"""First weights: from a key or from a file."""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal, cast, get_args

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from laconic.core import ConfigError, Key

Scheme = Literal["torch", "glorot", "he"]


def initialize(module: nn.Module, key: Key, *, scheme: Scheme = "torch", gain: float = 1.0) -> None:
    """Set the first weights of a module, in place: the same bits on every machine.

    Weights of convolutions and linear layers are uniform on ±`gain` · bound:

    | scheme | bound | biases |
    |---|---|---|
    | `torch` | 1/√fan_in, the distribution of PyTorch's constructors | the same |
    | `glorot` | √(6/(fan_in + fan_out)) (Glorot & Bengio, 2010) | 0 |
    | `he` | √(6/fan_in) (He et al., 2015) | 0 |

    Normalisation layers begin as the identity. A leaf depends on the key and on its own name only. Other parameters
    (embeddings, say) stay as the constructor made them.

    >>> net = nn.Linear(4, 1)
    >>> initialize(net, Key.from_seed(0))
    >>> [round(w, 4) for w in net.weight.flatten().tolist()]
    [0.3197, 0.2175, -0.0556, -0.4049]
    """
    for prefix, layer in module.named_modules():
        if isinstance(layer, (_ConvNd, nn.Linear)):
            bound = gain * _bound(layer.weight, scheme)
            for leaf, parameter in layer.named_parameters(prefix=prefix, recurse=False):
                zero = scheme != "torch" and parameter is layer.bias
                values = _uniform(key.fold_in(leaf), parameter.numel(), 0.0 if zero else bound)
                with torch.no_grad():
                    parameter.copy_(torch.from_numpy(values).reshape(parameter.shape))
        elif isinstance(layer, (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)):
            layer.reset_parameters()


def named_scheme(text: str) -> Callable[[nn.Module, Key], None] | None:
    """How a configuration names a scheme: "glorot", "torch:gain=1.15"; `None` where it names none (but a file, say).

    >>> named_scheme("he") is not None, named_scheme("weights.safetensors")
    (True, None)
    """
    name, _, setting = text.partition(":")
    if name not in get_args(Scheme):
        return None
    key, _, value = setting.partition("=")
    try:
        gain = float(value) if setting else 1.0
    except ValueError:
        gain = math.nan
    if (setting and key.strip() != "gain") or not 0 < gain < math.inf:
        raise ConfigError(f"[model] init: a scheme is written {name!r} or '{name}:gain=1.5', got {text!r}.")
    return functools.partial(initialize, scheme=cast(Scheme, name), gain=gain)


def _bound(weight: Tensor, scheme: Scheme) -> float:
    # One row of the weight is what one output sees (for transposed convolutions PyTorch counts so too).
    fan_in = max(1, math.prod(weight.shape[1:]))
    if scheme == "torch":
        return 1 / math.sqrt(fan_in)
    fan_out = max(1, weight.shape[0] * math.prod(weight.shape[2:]))
    return math.sqrt(6 / (fan_in + fan_out if scheme == "glorot" else fan_in))


def load_state(path: Path) -> dict[str, Tensor]:
    """The weights in a safetensors file, for `[model] init = "file.safetensors"`. Nothing in it is executed."""
    try:
        # From bytes: tensors of a mapped file would change, or crash, with the file.
        return safetensors.torch.load(Path(path).read_bytes())
    except OSError as error:
        near = difflib.get_close_matches(str(path), get_args(Scheme), n=1)
        hint = f"; did you mean the scheme {near[0]!r}?" if near else "."
        raise ConfigError(f"[model] init: cannot read {path} ({error.strerror}){hint}") from error
    except Exception as error:
        # The parser has no single error type: malformed headers, unknown dtypes and bad offsets each raise their own.
        raise ConfigError(
            f"[model] init: {path} is not a safetensors file ({' '.join(str(error).split())})."
        ) from error


def num_parameters(module: nn.Module) -> int:
    """Number of trainable and frozen parameters; buffers are not parameters.

    >>> num_parameters(nn.Linear(4, 3))
    15
    """
    return sum(parameter.numel() for parameter in module.parameters())


def share_gone(left: int, whole: int) -> float:
    """Sparsity: the share of a model's parameters that are gone, which are those cut off and those that are 0.

    >>> share_gone(left=25, whole=100)
    0.75
    """
    return 1 - left / whole


def sparsity(model: nn.Module, whole: nn.Module) -> dict[str, float]:
    """The share of parameters that are gone from a model, beside the whole architecture: in all, and by layer.

    Empty where nothing is gone. Layers are told where the model has them under their names (an ensemble has not).

    >>> whole, model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1)), nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 1))
    >>> sparsity(model, whole)
    {'sparsity': 0.46153846153846156, 'sparsity/0': 0.5, 'sparsity/1': 0.33333333333333337}
    """
    left = {name: int(leaf.count_nonzero()) for name, leaf in model.named_parameters()}
    sizes = {name: leaf.numel() for name, leaf in whole.named_parameters()}
    size = max(sum(sizes.values()), num_parameters(model))
    if sum(left.values()) == size:
        return {}
    layers: dict[str, list[str]] = {}
    for name in sizes:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    shares = {
        f"sparsity/{layer}": share_gone(sum(left[name] for name in names), sum(sizes[name] for name in names))
        for layer, names in layers.items()
        if all(name in left for name in names)
    }
    return {"sparsity": share_gone(sum(left.values()), size), **shares}


def _uniform(key: Key, size: int, bound: float) -> npt.NDArray[np.float32]:
    """Uniform on (−bound, bound), by raw Philox words and one rounding.

    numpy promises the words of a bit generator for ever, but not the floats that it makes of them. The 24 high
    bits k of a word give the odd multiple (2k + 1 − 2²⁴) / 2²⁴, which float32 holds exactly.
    """
    words = key.numpy().bit_generator.random_raw(size)
    odd = (words >> np.uint64(40)).astype(np.int32) * 2 + (1 - 2**24)
    unit = odd.astype(np.float32) / np.float32(2**24)
    values: npt.NDArray[np.float32] = unit * np.float32(bound)
    return values
