"""Gate groups: the parts of a model that are opened and closed together.

Structured: one gate per output filter of a convolution and per output neuron of a linear layer. A gate's **group** is
the unit's weights; its bias goes with it, and so do the unit's channels of the normalisation layer behind it (scale,
shift and running statistics): a channel is sent while any of the units that write into it is open. The layers that
write what the model returns have no gates, or (`gate_output`) one per *input* unit: closing a class makes no sense.

Unstructured: one gate per weight; biases and normalisation layers have none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from laconic.core import ConfigError, Tree, read_state
from laconic.models.anatomy import ALWAYS, Anatomy, Layer, Norm, dissect, is_dense


@dataclass(frozen=True, eq=False)
class Piece:
    """A leaf as (outer, units, inner): the values that belong to one place of the middle axis come and go together.

    `owners` are the gates of each place, one row per place; a place is present while any of its owners is open.
    A row is filled up with `gates + 1` (never open); `gates` is always open.
    """

    leaf: str
    shape: tuple[int, ...]
    outer: int
    units: int
    inner: int
    owners: Tensor
    gates: int

    @property
    def size(self) -> int:
        """Values per place."""
        return self.outer * self.inner

    @cached_property
    def first(self) -> int | None:
        """The first owner, where the owners are one gate per place, one after the other."""
        if self.owners.shape[1] != 1 or not len(self.owners):
            return None
        start = int(self.owners[0, 0])
        run = torch.arange(start, start + self.units)
        return start if torch.equal(self.owners[:, 0], run) and start + self.units <= self.gates else None

    def present(self, opened: Tensor) -> Tensor:
        """Which places are present when some gates are open."""
        if self.first is not None:
            return opened[self.first : self.first + self.units]
        return torch.cat([opened, opened.new_tensor([True, False])])[self.owners].any(dim=1)

    def rows(self, leaf: Tensor) -> Tensor:
        """The leaf as (units, size): a view of it where `outer` is 1, else a copy."""
        if self.outer == 1:
            return leaf.reshape(self.units, self.inner)
        return leaf.reshape(self.outer, self.units, self.inner).transpose(0, 1).reshape(self.units, self.size)

    def taken(self, leaf: Tensor, present: Tensor) -> Tensor:
        """The values of the places that are present, as one vector: what is sent."""
        rows = self.rows(leaf)
        return (rows if bool(present.all()) else rows[present]).reshape(-1)

    def put(self, values: Tensor, present: Tensor) -> Tensor:
        """The leaf, with zeros where nothing was sent."""
        if bool(present.all()):
            rows = values.reshape(self.units, self.size)
        else:
            rows = values.new_zeros(self.units, self.size)
            rows[present] = values.reshape(-1, self.size)
        if self.outer > 1:
            rows = rows.reshape(self.units, self.outer, self.inner).transpose(0, 1)
        return rows.reshape(self.shape)

    def times(self, leaf: Tensor, factors: Tensor) -> Tensor:
        """The leaf with each place multiplied by its factor."""
        if self.outer == 1 and self.inner == 1:
            return leaf * factors.view(self.shape)
        if self.outer == 1 and self.shape[0] == self.units:
            return leaf * factors.view(self.units, *(1,) * (len(self.shape) - 1))
        return (leaf.view(self.outer, self.units, self.inner) * factors.view(1, self.units, 1)).view(self.shape)


@dataclass(frozen=True, eq=False)
class GateLayer:
    """The gates of one layer: numbers `first` to `first + count`, the weights that they gate, and the bias."""

    name: str
    first: int
    count: int
    weight: Piece
    bias: Piece | None

    @property
    def gates(self) -> slice:
        """Where its gates stand among all."""
        return slice(self.first, self.first + self.count)


@dataclass(frozen=True, eq=False)
class Groups:
    """All gates of a model.

    `followers` are the leaves of normalisation layers whose channels come and go with units; every other leaf that is
    no layer's weight or bias is free of gates.

    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    >>> groups = find_groups(net)
    >>> groups.count, groups.sizes, groups.free
    (4, tensor([9., 9., 9., 9.]), ('3.weight', '3.bias'))
    """

    count: int
    layers: tuple[GateLayer, ...]
    followers: tuple[Piece, ...]
    free: tuple[str, ...]
    anatomy: Anatomy | None
    unit_of_gate: Tensor | None
    """The unit that each gate opens, where all gates are units' gates."""

    @cached_property
    def pieces(self) -> dict[str, Piece]:
        """Every leaf that is not free, by name."""
        own = [piece for layer in self.layers for piece in (layer.weight, layer.bias) if piece is not None]
        return {piece.leaf: piece for piece in (*own, *self.followers)}

    @cached_property
    def sizes(self) -> Tensor:
        """Weights per group, |g|."""
        return torch.cat([torch.full((layer.count,), float(layer.weight.size)) for layer in self.layers])

    def norms(self, weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """‖w_g‖₂ for every group."""
        found = []
        for layer in self.layers:
            rows = layer.weight.rows(weights[layer.weight.leaf].detach())
            found.append(
                rows.reshape(-1).abs().to(dtype or rows.dtype)
                if layer.weight.size == 1
                else torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
            )
        return torch.cat(found)

    def masked(self, weights: Mapping[str, Tensor], opened: Tensor) -> Tree:
        """The weights with zeros for everything that closed gates hold, channels of normalisation layers included."""
        masked: Tree = dict(weights)
        for name, piece in self.pieces.items():
            present = piece.present(opened)
            if not bool(present.all()):
                masked[name] = piece.times(weights[name], present.to(weights[name].dtype))
        return masked

    def open_units(self, opened: Tensor) -> Tensor:
        """Which of the model's units are open: those without a gate always are."""
        if self.anatomy is None or self.unit_of_gate is None:
            raise ConfigError("gates on single weights or on inputs of the output layer do not remove whole units.")
        units = torch.ones(self.anatomy.units, dtype=torch.bool)
        units[self.unit_of_gate] = opened[: len(self.unit_of_gate)].cpu()
        return units


def find_groups(
    module: nn.Module,
    *,
    structured: bool = True,
    gate_output: bool = False,
    only: Container[str] | None = None,
    dense: Collection[str] = (),
) -> Groups:
    """The gate groups of a model; `ConfigError` where it has none.

    With `only`, layers any of whose leaves is not in it have no gates; nor have layers whose units cannot be followed
    (`Anatomy.whole`), unless gates are on single weights, and those with a leaf that matches a pattern of `dense`.
    """
    anatomy = dissect(module, dense)
    leaves = {name: leaf for name, leaf in read_state(module).items() if only is None or name in only}
    layers_in = [
        layer
        for layer in anatomy.layers
        if layer.weight_leaf in leaves and (not layer.bias or layer.bias_leaf in leaves)
    ]
    spared = {layer.name for layer in layers_in if is_dense(layer.weight_leaf, dense)}
    gated = [layer for layer in layers_in if not layer.output and not (layer.fixed if structured else False)]
    gated = [layer for layer in gated if layer.name not in spared]
    heads = [layer for layer in layers_in if layer.output and layer.name not in spared] if gate_output else []
    if not gated and not heads:
        what = "this model" if only is None else "what is shared of this model"
        why = "".join(f"; {name!r} stays whole: {reason}" for name, reason in list(anatomy.whole.items())[:1])
        raise ConfigError(
            f"{what} has no gateable layer: gates need a convolution or linear layer before the output layer{why}. "
            + ("Share more layers" if only is not None else "Set structured = false to gate single weights")
            + ", or gate_output = true to gate what the output layer reads."
        )
    count = (
        sum(layer.units for layer in gated) + sum(layer.shape[1] // layer.columns for layer in heads)
        if structured
        else sum(math.prod(layer.shape) for layer in (*gated, *heads))
    )
    layers: list[GateLayer] = []
    followers: tuple[Piece, ...] = ()
    unit_of_gate: Tensor | None = None
    first = 0
    if structured:
        for layer in gated:
            layers.append(_by_unit(layer, first, count))
            first += layer.units
        unit_of_gate = torch.cat([torch.arange(lay.first, lay.first + lay.units) for lay in gated] or [torch.zeros(0)])
        followers = tuple(
            piece
            for norm in anatomy.norms
            for piece in _following(norm, unit_of_gate.long(), leaves, count)
            if not bool((piece.owners == count).any(dim=1).all())
        )
        for layer in heads:
            layers.append(_by_input(layer, first, count))
            first += layers[-1].count
    else:
        for layer in (*gated, *heads):
            layers.append(_by_weight(layer, first, count))
            first += layers[-1].count
    held = {piece.leaf for entry in layers for piece in (entry.weight, entry.bias) if piece is not None}
    held |= {piece.leaf for piece in followers}
    return Groups(
        count=count,
        layers=tuple(layers),
        followers=followers,
        free=tuple(name for name in leaves if name not in held),
        anatomy=anatomy if structured else None,
        unit_of_gate=unit_of_gate.long() if unit_of_gate is not None else None,
    )


def _by_unit(layer: Layer, first: int, gates: int) -> GateLayer:
    owners = torch.arange(first, first + layer.units).view(-1, 1)
    inner = math.prod(layer.shape[1:])
    bias = Piece(layer.bias_leaf, (layer.units,), 1, layer.units, 1, owners, gates) if layer.bias else None
    weight = Piece(layer.weight_leaf, layer.shape, 1, layer.units, inner, owners, gates)
    return GateLayer(layer.name, first, layer.units, weight, bias)


def _by_input(layer: Layer, first: int, gates: int) -> GateLayer:
    count = layer.shape[1] // layer.columns
    inner = math.prod(layer.shape[2:]) * layer.columns
    owners = torch.arange(first, first + count).view(-1, 1)
    return GateLayer(
        layer.name, first, count, Piece(layer.weight_leaf, layer.shape, layer.units, count, inner, owners, gates), None
    )


def _by_weight(layer: Layer, first: int, gates: int) -> GateLayer:
    count = math.prod(layer.shape)
    owners = torch.arange(first, first + count).view(-1, 1)
    return GateLayer(layer.name, first, count, Piece(layer.weight_leaf, layer.shape, 1, count, 1, owners, gates), None)


def _following(norm: Norm, unit_of_gate: Tensor, leaves: Mapping[str, Tensor], gates: int) -> list[Piece]:
    """The pieces of a normalisation layer: each channel is owned by the gates of all its sources."""
    gate_of_unit = {unit: gate for gate, unit in enumerate(unit_of_gate.tolist())}
    width = max((len(sources) for sources in norm.sources), default=1)
    rows = []
    for sources in norm.sources:
        # A source without a gate (the inputs, an output layer) keeps its channels for ever.
        owned = [gates if unit == ALWAYS else gate_of_unit.get(unit, gates) for unit in sorted(sources)]
        rows.append([*owned, *[gates + 1] * (width - len(owned))])
    owners = torch.tensor(rows, dtype=torch.long).reshape(len(rows), width)
    return [
        Piece(name, (len(rows) * norm.columns,), 1, len(rows), norm.columns, owners, gates)
        for name in norm.leaves
        if name in leaves
    ]
