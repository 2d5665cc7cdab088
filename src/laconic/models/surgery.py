"""Surgery: a model with some of its units physically removed.

What is left computes exactly what the whole model computes when the removed units' weights and biases, and their
channels of the normalisation layers, are zero:

* a layer loses the rows of its closed units and the columns of the slots that are gone (k·k columns each after
  `Flatten`); a normalisation layer loses the channels;
* GroupNorm and LayerNorm divide by the number of channels that they had: removed channels were zeros, and zeros count.
  Where whole groups of a GroupNorm are gone and the others are whole, an ordinary GroupNorm is left; else a
  `CountedGroupNorm`;
* in a residual stream a slot goes only if nothing writes it. A layer that has fewer open units than the stream has
  channels is sliced all the same, and a `Spread` puts its outputs where they belong.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from laconic.core import ConfigError, Tree, read_state
from laconic.models.anatomy import ALWAYS, Anatomy, Layer, Norm, Pad
from laconic.models.resnet import PadShortcut


class Cut(NamedTuple):
    """What is left of a leaf: indices into its first and its second axis; `None` is all of it."""

    rows: Tensor | None = None
    columns: Tensor | None = None

    def take(self, leaf: Tensor) -> Tensor:
        """What is left of a leaf, as a new tensor."""
        if self.rows is None and self.columns is None:
            return leaf.clone()
        part = leaf if self.rows is None else leaf.index_select(0, self.rows)
        return part if self.columns is None else part.index_select(1, self.columns)

    def put(self, leaf: Tensor, part: Tensor) -> Tensor:
        """The leaf with this in the place of what is left of it, as a new tensor."""
        if self.rows is None and self.columns is None:
            return part.clone()
        whole = leaf.clone()
        if self.columns is None:
            return whole.index_copy_(0, self._rows, part)
        if self.rows is None:
            return whole.index_copy_(1, self.columns, part)
        wide = leaf.index_select(0, self.rows).index_copy_(1, self.columns, part)
        return whole.index_copy_(0, self.rows, wide)

    def add_to(self, leaf: Tensor, part: Tensor, *, alpha: float = 1.0) -> None:
        """Add a part to the leaf that it was taken from, in place."""
        if self.rows is None and self.columns is None:
            leaf.add_(part, alpha=alpha)
        elif self.columns is None:
            leaf.index_add_(0, self._rows, part, alpha=alpha)
        elif self.rows is None:
            leaf.index_add_(1, self.columns, part, alpha=alpha)
        else:
            # Scattered columns in a compact block of rows first: one index_add per axis instead of one per value.
            wide = leaf.index_select(0, self.rows)
            wide.index_add_(1, self.columns, part, alpha=alpha)
            leaf.index_copy_(0, self.rows, wide)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is left."""
        rows = shape[:1] if self.rows is None else (len(self.rows),)
        columns = shape[1:2] if self.columns is None else (len(self.columns),)
        return (*rows, *columns, *shape[2:])

    @property
    def _rows(self) -> Tensor:
        assert self.rows is not None  # noqa: S101 - for the type checker
        return self.rows


class Plan(NamedTuple):
    """Which units and which slots stay, and what that leaves of every leaf that shrinks."""

    open_units: Tensor
    present: Mapping[int, bool]
    cuts: Mapping[str, Cut]


def plan(anatomy: Anatomy, open_units: Tensor, present: Mapping[int, bool] | None = None) -> Plan:
    """What is left of each leaf when only some units are open.

    `present` says which slots stay; by default those into which any open unit writes.
    """
    present = anatomy.present(open_units) if present is None else present
    cuts: dict[str, Cut] = {}
    for layer in anatomy.layers:
        rows = _index(open_units[layer.first : layer.first + layer.units])
        if rows is not None and not len(rows):
            raise ConfigError(f"all units of the layer {layer.name!r} are closed; a layer needs at least one.")
        columns = None if layer.inputs is None else _index(_mask(layer.inputs, present), layer.columns)
        if columns is not None and not len(columns):
            raise ConfigError(f"all inputs of the layer {layer.name!r} are closed; a layer needs at least one.")
        cuts[layer.weight_leaf] = Cut(rows, columns)
        if layer.bias:
            cuts[layer.bias_leaf] = Cut(rows)
    for norm in anatomy.norms:
        channels = _index(_channels(anatomy, norm, open_units, present), norm.columns)
        cuts |= dict.fromkeys(norm.leaves, Cut(channels))
    return Plan(open_units, present, {name: cut for name, cut in cuts.items() if cut != Cut()})


def slice_tree(tree: Mapping[str, Tensor], cuts: Mapping[str, Cut]) -> Tree:
    """What is left of a model's weights."""
    return {name: cuts.get(name, Cut()).take(leaf) for name, leaf in tree.items()}


def sliced(module: nn.Module, anatomy: Anatomy, chosen: Plan) -> nn.Module:
    """A smaller copy of a model.

    >>> from laconic.models.anatomy import dissect
    >>> net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    >>> open_units = torch.tensor([True, False, True, True, False, False] + [True, True])
    >>> anatomy = dissect(net)
    >>> sliced(net, anatomy, plan(anatomy, open_units))
    Sequential(
      (0): Linear(in_features=8, out_features=3, bias=True)
      (1): ReLU()
      (2): Linear(in_features=3, out_features=2, bias=True)
    )
    """
    small = copy.deepcopy(module)
    spreads: dict[str, Spread] = {}
    for layer in anatomy.layers:
        _slice_layer(small.get_submodule(layer.name), layer, chosen.cuts)
        own = chosen.open_units[layer.first : layer.first + layer.units]
        stays = _mask(layer.outputs, chosen.present)
        if not torch.equal(own, stays):
            axis = 1 if layer.convolution else -1
            spreads[layer.meets] = Spread(_index_of(_places(own, stays)), int(stays.sum()), axis)
    for norm in anatomy.norms:
        _silence(small.get_submodule(norm.name), norm, chosen.open_units)
        kept = _channels(anatomy, norm, chosen.open_units, chosen.present)
        if not bool(kept.all()):
            _replace(small, norm.name, _sliced_norm(small.get_submodule(norm.name), norm, kept, chosen.cuts))
    for pad in anatomy.pads:
        _replace(small, pad.name, _sliced_pad(small.get_submodule(pad.name), pad, chosen.present))
    for name, spread in spreads.items():
        _replace(small, name, nn.Sequential(small.get_submodule(name), spread))
    return small


class Spread(nn.Module):
    """Puts channels into the places that they have in a wider stream; the other channels are zero.

    `axis` is where the channels are: 1 behind a convolution, -1 behind a linear layer.
    """

    def __init__(self, places: Tensor, channels: int, axis: int = 1) -> None:
        super().__init__()
        self.channels = channels
        self.axis = axis
        self.register_buffer("places", places, persistent=False)
        self.places: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """The wider value."""
        shape = list(x.shape)
        shape[self.axis] = self.channels
        return x.new_zeros(shape).index_copy(self.axis, self.places, x)

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"{len(self.places)} of {self.channels} channels"


class SlicedPad(nn.Module):
    """A `PadShortcut` between streams that lost channels: every `stride`-th pixel, the channels that both have."""

    def __init__(self, kept: Tensor, places: Tensor, channels: int, *, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.channels = channels
        self.register_buffer("kept", kept, persistent=False)
        self.register_buffer("places", places, persistent=False)
        self.kept: Tensor
        self.places: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Subsample, pick and place."""
        x = x[:, :, :: self.stride, :: self.stride]
        out = x.new_zeros(x.shape[0], self.channels, *x.shape[2:])
        return out.index_copy(1, self.places, x.index_select(1, self.kept))


class CountedGroupNorm(nn.Module):
    """GroupNorm over groups that lost channels: statistics are those of the whole group, its lost channels being zero.

    The channels are put where they were, normalised there, and taken out again: two copies around torch's own kernel
    cost a fifth of computing the statistics here.
    """

    def __init__(self, kept: Tensor, groups: int, *, eps: float, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.eps = eps
        self.groups = groups
        self.channels = len(kept)
        self.register_buffer("places", kept.nonzero().view(-1), persistent=False)
        self.places: Tensor
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias) if bias is not None else None

    def forward(self, x: Tensor) -> Tensor:
        """The normalised channels."""
        whole = x.new_zeros(x.shape[0], self.channels, *x.shape[2:]).index_copy(1, self.places, x)
        weight = x.new_zeros(self.channels).index_copy(0, self.places, self.weight)
        bias = None if self.bias is None else x.new_zeros(self.channels).index_copy(0, self.places, self.bias)
        return F.group_norm(whole, self.groups, weight, bias, self.eps).index_select(1, self.places)

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"{self.groups}, {len(self.places)} of {self.channels} channels, eps={self.eps}"


class CountedLayerNorm(nn.Module):
    """LayerNorm over features of which some are gone: they were zeros, and they count."""

    def __init__(self, features: int, *, eps: float, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.features = features
        self.eps = eps
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias) if bias is not None else None

    def forward(self, x: Tensor) -> Tensor:
        """The normalised features."""
        mean = x.sum(dim=-1, keepdim=True) / self.features
        lost = self.features - x.shape[-1]
        total = (x - mean).square().sum(dim=-1, keepdim=True) + lost * mean.square()
        out = (x - mean) * (total / self.features + self.eps).rsqrt() * self.weight
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"{len(self.weight)} of {self.features} features, eps={self.eps}"


def multiply_adds(module: nn.Module, example: Tensor | tuple[int, ...]) -> int:
    """Multiply-adds of convolutions and linear layers for one input: a batch of one, or its shape without that axis.

    >>> multiply_adds(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)), (8,))
    60
    """
    total = 0

    def count(layer: nn.Module, _: object, output: Tensor) -> None:
        nonlocal total
        weight = layer.weight
        assert isinstance(weight, Tensor)  # noqa: S101 - for the type checker
        total += output.numel() * math.prod(weight.shape[1:])

    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    hooks = [m.register_forward_hook(count) for m in module.modules() if isinstance(m, kinds)]
    training = module.training
    leaf = next(iter(read_state(module).values()))
    x = example if isinstance(example, Tensor) else torch.zeros(1, *example, dtype=leaf.dtype)
    try:
        with torch.no_grad():
            module.eval()(x.to(leaf.device))
    finally:
        module.train(training)
        for hook in hooks:
            hook.remove()
    return total


def _slice_layer(layer: nn.Module, found: Layer, cuts: Mapping[str, Cut]) -> None:
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, nn.Parameter)  # noqa: S101 - for the type checker
    layer.weight = _part(weight, cuts.get(found.weight_leaf, Cut()))
    if isinstance(bias, nn.Parameter):
        layer.bias = _part(bias, cuts.get(found.bias_leaf, Cut()))
    out, inputs = layer.weight.shape[:2]
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = out, inputs
    else:
        layer.out_channels, layer.in_channels = out, inputs  # type: ignore[assignment]


def _silence(layer: nn.Module, norm: Norm, open_units: Tensor) -> None:
    """Zero scale and shift of channels that have a place in a stream, but no open source yet where the norm stands."""
    opened = open_units.tolist()
    heard = torch.tensor([any(unit == ALWAYS or opened[unit] for unit in sources) for sources in norm.sources])
    if not bool(heard.all()):
        silent = ~heard.repeat_interleave(norm.columns)
        with torch.no_grad():
            for parameter in layer.parameters(recurse=False):
                parameter[silent] = 0.0


def _sliced_norm(layer: nn.Module, norm: Norm, kept: Tensor, cuts: Mapping[str, Cut]) -> nn.Module:
    cut = cuts[norm.leaves[0]]
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)  # noqa: S101 - for the type checker
    assert bias is None or isinstance(bias, Tensor)  # noqa: S101 - for the type checker
    small_weight = cut.take(weight.detach())
    small_bias = None if bias is None else cut.take(bias.detach())
    if isinstance(layer, nn.LayerNorm):
        return CountedLayerNorm(len(kept), eps=layer.eps, weight=small_weight, bias=small_bias)
    if isinstance(layer, nn.GroupNorm):
        groups = kept.view(layer.num_groups, -1)
        if bool((groups.all(dim=1) | ~groups.any(dim=1)).all()):
            return _group_norm(int(groups.any(dim=1).sum()), layer.eps, small_weight, small_bias)
        return CountedGroupNorm(kept, layer.num_groups, eps=layer.eps, weight=small_weight, bias=small_bias)
    assert isinstance(layer, _NormBase)  # noqa: S101 - for the type checker
    layer.num_features = len(small_weight)
    for name, parameter in list(layer.named_parameters(recurse=False)):
        setattr(layer, name, _part(parameter, cut))
    for name, buffer in list(layer.named_buffers(recurse=False)):
        if buffer.dim():
            setattr(layer, name, cut.take(buffer))
    return layer


def _group_norm(groups: int, eps: float, weight: Tensor, bias: Tensor | None) -> nn.GroupNorm:
    layer = nn.GroupNorm(groups, len(weight), eps=eps)
    layer.weight = nn.Parameter(weight)
    layer.bias = nn.Parameter(bias if bias is not None else torch.zeros_like(weight))
    return layer


def _sliced_pad(layer: nn.Module, pad: Pad, present: Mapping[int, bool]) -> nn.Module:
    assert isinstance(layer, PadShortcut)  # noqa: S101 - for the type checker
    before, after = _mask(pad.before, present), _mask(pad.after, present)
    common = before & after[: len(before)]
    if torch.equal(before, after[: len(before)]):
        return PadShortcut(int(before.sum()), int(after.sum()), stride=layer.stride)
    places = _index_of(_places(_padded(common, len(after)), after))
    return SlicedPad(_index_of(_places(common, before)), places, int(after.sum()), stride=layer.stride)


def _channels(anatomy: Anatomy, norm: Norm, open_units: Tensor, present: Mapping[int, bool]) -> Tensor:
    """Which channels of a normalisation layer stay."""
    if norm.follows is not None:
        layer = anatomy.layers[norm.follows]
        return open_units[layer.first : layer.first + layer.units]
    return _mask(norm.slots, present)


def _mask(slots: tuple[int, ...], present: Mapping[int, bool]) -> Tensor:
    return torch.tensor([present[slot] for slot in slots], dtype=torch.bool)


def _index(kept: Tensor, columns: int = 1) -> Tensor | None:
    """Indices of what is kept, each `columns` wide; `None` if that is all."""
    if bool(kept.all()):
        return None
    return kept.repeat_interleave(columns).nonzero().view(-1)


def _places(some: Tensor, of: Tensor) -> Tensor:
    """Which of the places that `of` keeps are also in `some`."""
    return some[of]


def _index_of(mask: Tensor) -> Tensor:
    return mask.nonzero().view(-1)


def _padded(mask: Tensor, size: int) -> Tensor:
    return torch.cat([mask, mask.new_zeros(size - len(mask))])


def _part(parameter: nn.Parameter, cut: Cut) -> nn.Parameter:
    return nn.Parameter(cut.take(parameter.detach()), requires_grad=parameter.requires_grad)


def _replace(module: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    module.get_submodule(parent)._modules[child] = new
