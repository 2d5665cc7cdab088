"""How the layers of a model follow each other: which units (filters, neurons) write which channels, and who reads them.

A model is traced symbolically, without an input, and its channels are followed from layer to layer:

* a **unit** is an output filter of a convolution or an output neuron of a linear layer; units are numbered through the
  whole model, in the order of the computation;
* a channel's **sources** are the units that write into it, those that reach it through shortcuts included: the channel
  is zero if all its sources are closed;
* a **slot** is the physical place of a channel. Where values are added (a residual stream), their channels share slots,
  so that whoever removes a slot removes it from every layer that writes it or reads it.

Through `Flatten` a channel becomes k·k columns; k·k follows from the size of the linear layer that reads them.

What cannot be followed stays whole: units whose channels go through an unknown function or layer (an LSTM, attention),
layers that are used twice or whose weights are tied, and what the caller names in `dense`. Their layers are `fixed`;
`Anatomy.whole` says why.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from laconic.core import ConfigError
from laconic.models.resnet import PadShortcut

_ASKED = "it is among dense"
ALWAYS = -1
"""The source of what no unit writes: the model's inputs. It is never closed."""
Sources = frozenset[int]

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm)
# What keeps the zeros of a closed channel, and treats every channel alike.
_CHANNELWISE = (
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.SELU, nn.CELU, nn.RReLU),
    *(nn.Tanh, nn.Hardtanh, nn.Hardswish, nn.Softsign, nn.Softshrink, nn.Hardshrink, nn.Tanhshrink),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    *(nn.Upsample, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d),
)
_CHANNELWISE_FUNCTIONS = {
    *("relu", "relu_", "relu6", "leaky_relu", "gelu", "silu", "mish", "elu", "selu", "celu", "tanh", "hardtanh"),
    *("hardswish", "softsign", "dropout", "dropout1d", "dropout2d", "dropout3d", "contiguous", "clone"),
    *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "interpolate"),
}
_SIZES = {"size", "dim", "numel", "getattr"}


@dataclass(frozen=True)
class Layer:
    """A convolution or a linear layer.

    `inputs` are the slots that it reads (`None`: the model's own inputs), each `columns` columns wide; `outputs` the
    slots that its units write. `meets` is the module behind which its outputs take their place in the slots: the
    normalisation layer that alone follows it, or the layer itself.
    """

    name: str
    convolution: bool
    units: int
    first: int
    shape: tuple[int, ...]
    bias: bool
    inputs: tuple[int, ...] | None
    columns: int
    outputs: tuple[int, ...]
    meets: str
    output: bool = False
    fixed: bool = False
    """Whether all of its units stay: they cannot be followed, or somebody wants them whole."""

    @property
    def weight_leaf(self) -> str:
        """The name of its weights."""
        return f"{self.name}.weight"

    @property
    def bias_leaf(self) -> str:
        """The name of its bias."""
        return f"{self.name}.bias"


@dataclass(frozen=True)
class Norm:
    """A normalisation layer: its channels' slots and sources, `columns` values per channel.

    `follows` is the layer whose units alone it normalises, before they take their place in a stream.
    """

    name: str
    leaves: tuple[str, ...]
    slots: tuple[int, ...]
    sources: tuple[Sources, ...]
    columns: int
    follows: int | None


@dataclass(frozen=True)
class Pad:
    """A `PadShortcut`: the slots that it reads and those that it writes, the new channels last."""

    name: str
    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True)
class Anatomy:
    """Layers, normalisation layers and shortcuts of a model, and the slots that connect them.

    `whole` are the layers that nothing can be removed from, each with the reason.
    """

    layers: tuple[Layer, ...]
    norms: tuple[Norm, ...]
    pads: tuple[Pad, ...]
    slot_sources: dict[int, Sources]
    whole: Mapping[str, str] = field(default_factory=dict)

    @property
    def units(self) -> int:
        """Number of units of all layers."""
        return sum(layer.units for layer in self.layers)

    @cached_property
    def shared_slots(self) -> frozenset[int]:
        """Slots of residual streams: more than one unit writes them, or a shortcut leads to or from them."""
        count: dict[int, int] = {}
        for layer in self.layers:
            for slot in layer.outputs:
                count[slot] = count.get(slot, 0) + 1
        padded = {slot for pad in self.pads for slot in (*pad.before, *pad.after)}
        return frozenset({slot for slot, writers in count.items() if writers > 1} | padded)

    def present(self, open_units: Tensor) -> dict[int, bool]:
        """Which slots hold anything when only some units are open."""
        opened = open_units.tolist()
        return {
            slot: any(source == ALWAYS or opened[source] for source in sources)
            for slot, sources in self.slot_sources.items()
        }


def dissect(module: nn.Module, dense: Collection[str] = ()) -> Anatomy:
    """The anatomy of a model; layers with a leaf that matches a pattern of `dense` keep all of their units.

    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    >>> conv, linear = dissect(net).layers
    >>> conv.units, linear.columns, linear.inputs == conv.outputs, linear.output
    (4, 36, True, True)
    >>> dissect(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2))).whole
    {'0': "the layer '1' is a Sigmoid"}
    """
    if isinstance(module, (nn.Linear, *_CONVS)):
        module = nn.Sequential(module)  # a leaf of the tracer must be somebody's child
    try:
        graph = _Tracer().trace(module)
    except Exception as error:
        said = " ".join(str(error).split())
        raise ConfigError(
            f"the layers of this model cannot be followed: its forward cannot be traced ({said}); write it without "
            "branches on values, or use a method that looks at no units, such as fedavg or vardrop."
        ) from error
    return _Walk(module, graph, tuple(dense), tied=tied_layers(module)).result()


def tied_layers(module: nn.Module) -> frozenset[str]:
    """Names of the layers whose parameters other layers use, too.

    >>> net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> net[2].weight = net[0].weight
    >>> sorted(tied_layers(net))
    ['0', '2']
    """
    owners: dict[int, set[str]] = {}
    for name, layer in module.named_modules():
        for parameter in layer.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(name)
    return frozenset(name for names in owners.values() if len(names) > 1 for name in names)


def leave_dense(method: str, whole: Mapping[str, str], *, instead: str) -> None:
    """One warning that a method cannot treat some layers, and what becomes of them."""
    named = {name: reason for name, reason in whole.items() if reason != _ASKED}
    if named:
        first, reason = next(iter(named.items()))
        others = f" and {len(named) - 1} more" if len(named) > 1 else ""
        warnings.warn(
            f"{method} {instead} {first!r}{others} ({reason}); "
            f'name them in dense (dense = ["{first}.*"]) to say that this is meant.',
            RuntimeWarning,
            stacklevel=2,
        )


def is_dense(leaf: str, dense: Collection[str]) -> bool:
    """Whether a leaf is among those that a method is asked to leave whole."""
    return any(fnmatchcase(leaf, pattern) for pattern in dense)


class _Tracer(fx.Tracer):
    """Stops at the layers of torch and at `PadShortcut`."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is a node of its own."""
        return isinstance(m, (PadShortcut, *_CONVS, nn.Linear)) or super().is_leaf_module(m, module_qualified_name)


@dataclass(frozen=True)
class _Value:
    """What flows: channels as slots with their sources.

    `spatial` has pixels; `flat` is one column per channel; `folded` is flattened, its columns per channel yet unknown.
    """

    slots: tuple[int, ...]
    sources: tuple[Sources, ...]
    kind: Literal["spatial", "flat", "folded"]


class _Free:
    """What no unit has written: inputs and what is computed from them alone."""


_FREE = _Free()
_Seen = _Value | _Free | None  # None: a size, a number


@dataclass
class _Walk:
    """Follows the channels through a graph, node by node."""

    module: nn.Module
    graph: fx.Graph
    dense: tuple[str, ...]
    tied: frozenset[str]
    layers: list[Layer] = field(default_factory=list)
    norms: list[Norm] = field(default_factory=list)
    pads: list[Pad] = field(default_factory=list)
    obstacles: list[tuple[str, frozenset[int]]] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    values: dict[fx.Node, _Seen] = field(default_factory=dict)
    visited: dict[str, _Seen] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    wrote: list[tuple[tuple[int, ...], tuple[Sources, ...]]] = field(default_factory=list)

    def result(self) -> Anatomy:
        """The anatomy."""
        returned: frozenset[int] = frozenset()
        for node in self.graph.nodes:
            if node.op == "output":
                returned = _units(self._tensors(node))
            else:
                self.values[node] = self._visit(node)
        for obstacle, units in self.obstacles:
            for unit in sorted(units - returned - {ALWAYS}):
                self.whole.setdefault(self._layer_of(unit).name, obstacle)
        for layer in self.layers:
            if is_dense(layer.weight_leaf, self.dense) or (layer.bias and is_dense(layer.bias_leaf, self.dense)):
                self.whole[layer.name] = _ASKED
        slot_sources: dict[int, set[int]] = {}
        for slots, sources in self.wrote:
            for slot, units in zip(slots, sources, strict=True):
                slot_sources.setdefault(self._root(slot), set()).update(units)
        return Anatomy(
            layers=tuple(
                replace(
                    layer,
                    inputs=None if layer.inputs is None else self._roots(layer.inputs),
                    outputs=self._roots(layer.outputs),
                    output=layer.first in returned,
                    fixed=layer.name in self.whole,
                )
                for layer in self.layers
            ),
            norms=tuple(replace(norm, slots=self._roots(norm.slots)) for norm in self.norms),
            pads=tuple(replace(p, before=self._roots(p.before), after=self._roots(p.after)) for p in self.pads),
            slot_sources={slot: frozenset(units) for slot, units in slot_sources.items()},
            whole=self.whole,
        )

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _visit(self, node: fx.Node) -> _Seen:
        if node.op == "placeholder":
            return _FREE
        if node.op == "get_attr":
            name = str(node.target)
            owner, reason = name.rpartition(".")[0], f"a function uses {name!r}"
            self.tied |= {owner}
            if owner in self.visited:
                self.obstacles.append((reason, _units([self.visited[owner]])))
                self._keep([layer for layer in self.layers if layer.name == owner], reason)
            return _FREE
        if node.op == "call_module":
            return self._visit_module(node, str(node.target), self.module.get_submodule(str(node.target)))
        return self._visit_function(node)

    def _visit_module(self, node: fx.Node, name: str, layer: nn.Module) -> _Seen:
        value = self._tensors(node)[0] if self._tensors(node) else None
        if any(True for _ in layer.parameters()):
            if name in self.visited:
                first = self.visited[name]
                self.obstacles.append((f"the layer {name!r} is used twice", _units([first])))
                self._keep([known for known in self.layers if known.name == name], "it is used twice")
                return self._opaque(node, name, f"the layer {name!r} is used twice")
            self.visited[name] = value
            if name in self.tied:
                return self._opaque(node, name, "its weights are used elsewhere, too")
        if isinstance(layer, (nn.Linear, *_CONVS)):
            return self._visit_layer(node, name, layer, value)
        if isinstance(layer, _NORMS):
            return self._visit_norm(node, name, layer, value)
        if any(True for _ in layer.parameters()):
            return self._opaque(node, name, f"it is a {type(layer).__name__}")
        if not isinstance(value, _Value):
            return value
        if isinstance(layer, PadShortcut):
            return self._visit_pad(name, layer, value)
        if isinstance(layer, nn.Flatten):
            return self._flattened(node, value, layer.start_dim, layer.end_dim)
        if not isinstance(layer, _CHANNELWISE):
            self._obstacle(node, value)
        return value

    def _opaque(self, node: fx.Node, name: str, reason: str) -> _Free:
        """A layer that stays whole, and so does what it reads; what it gives is no unit's."""
        leaves = [f"{name}.{leaf}" for leaf, _ in self.module.get_submodule(name).named_parameters()]
        self.whole.setdefault(name, _ASKED if all(is_dense(leaf, self.dense) for leaf in leaves) else reason)
        self._obstacle(node, *(value for value in self._tensors(node) if isinstance(value, _Value)))
        return _FREE

    def _keep(self, layers: list[Layer], reason: str) -> None:
        for layer in layers:
            self.whole.setdefault(layer.name, reason)

    def _visit_layer(self, node: fx.Node, name: str, layer: nn.Module, value: _Seen) -> _Seen:
        convolution = isinstance(layer, _CONVS)
        if set(dict(layer.named_parameters(recurse=False))) - {"weight", "bias"} or "weight" not in layer._parameters:
            return self._opaque(node, name, f"it is a {type(layer).__name__} with a weight that is computed")
        if isinstance(layer, _CONVS) and layer.groups != 1:
            return self._opaque(node, name, f"it is a convolution with groups = {layer.groups}")
        shape = tuple(layer.weight.shape)  # type: ignore[arg-type]
        columns = 1
        if isinstance(value, _Value):
            fits = shape[1] % len(value.slots) == 0 and (value.kind == "folded" or shape[1] == len(value.slots))
            if convolution is not (value.kind == "spatial") or not fits:
                self._obstacle(node, value)
            columns = max(1, shape[1] // len(value.slots))
        first = sum(before.units for before in self.layers)
        outputs = self._fresh(shape[0])
        users = list(node.users)
        alone = users[0] if len(users) == 1 and users[0].op == "call_module" else None
        normed = alone is not None and isinstance(self.module.get_submodule(str(alone.target)), _NORMS)
        self.layers.append(
            Layer(
                name=name,
                convolution=convolution,
                units=shape[0],
                first=first,
                shape=shape,
                bias=layer.bias is not None,
                inputs=value.slots if isinstance(value, _Value) else None,
                columns=columns,
                outputs=outputs,
                meets=str(alone.target) if alone is not None and normed else name,
            )
        )
        sources = tuple(frozenset({first + unit}) for unit in range(shape[0]))
        return self._written(_Value(outputs, sources, "spatial" if convolution else "flat"))

    def _visit_norm(self, node: fx.Node, name: str, layer: nn.Module, value: _Seen) -> _Seen:
        if not isinstance(value, _Value):
            return value
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, Tensor):  # without a weight it cannot silence a channel that was removed
            self._obstacle(node, value)
            return value
        if weight.dim() != 1 or len(weight) % len(value.slots):
            self._obstacle(node, value)
        if isinstance(layer, nn.LayerNorm) and value.kind == "spatial":
            self._obstacle(node, value)
        columns = max(1, len(weight) // len(value.slots))
        if columns > 1 and not isinstance(layer, _NormBase):
            self._obstacle(node, value)
        follows = next((i for i, before in enumerate(self.layers) if before.meets == name), None)
        leaves = tuple(
            f"{name}.{leaf}"
            for leaf, tensor in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))
            if tensor.is_floating_point()
        )
        self.norms.append(Norm(name, leaves, value.slots, value.sources, columns, follows))
        return value

    def _visit_pad(self, name: str, layer: PadShortcut, value: _Value) -> _Value:
        after = self._fresh(len(value.slots) + layer.new_channels)
        sources = (*value.sources, *(frozenset[int]() for _ in range(layer.new_channels)))
        self.pads.append(Pad(name, value.slots, after))
        return self._written(_Value(after, sources, "spatial"))

    def _visit_function(self, node: fx.Node) -> _Seen:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        tensors = self._tensors(node)
        values = [tensor for tensor in tensors if isinstance(tensor, _Value)]
        if not values:
            return _FREE if tensors else None
        value = values[0]
        if name in _SIZES:
            return None
        if name in _CHANNELWISE_FUNCTIONS:
            return value
        known: dict[str, Callable[[fx.Node, list[_Seen]], _Value]] = {
            **dict.fromkeys(("add", "iadd", "add_"), self._add),
            **dict.fromkeys(("mul", "truediv", "div"), self._scale),
            **dict.fromkeys(("flatten",), self._flatten),
            **dict.fromkeys(("view", "reshape"), self._view),
            **dict.fromkeys(("mean",), self._mean),
            **dict.fromkeys(("cat", "concat", "concatenate"), self._concatenate),
        }
        if name in known:
            return known[name](node, tensors)
        self._obstacle(node, *values)
        return value

    # --- functions ---------------------------------------------------------------------------------------------------

    def _add(self, node: fx.Node, tensors: list[_Seen]) -> _Value:
        values = [tensor for tensor in tensors if isinstance(tensor, _Value)]
        sources = values[0].sources
        if len(values) < len([a for a in node.args if a is not None]) or node.kwargs:
            # Something that is no unit's is added: the channels are never silent, nor can they be removed.
            if not all(isinstance(tensor, (_Value, _Free)) for tensor in tensors) or len(tensors) < len(node.args):
                self._obstacle(node, *values)
            sources = tuple(own | {ALWAYS} for own in sources)
        for other in values[1:]:
            if len(other.slots) != len(values[0].slots) or other.kind != values[0].kind:
                self._obstacle(node, *values)
                return values[0]
            for a, b in zip(values[0].slots, other.slots, strict=True):
                self.parents[self._root(a)] = self._root(b)
            sources = tuple(own | new for own, new in zip(sources, other.sources, strict=True))
        return self._written(replace(values[0], sources=sources))

    def _scale(self, node: fx.Node, tensors: list[_Seen]) -> _Value:
        value = next(tensor for tensor in tensors if isinstance(tensor, _Value))
        first, *others = node.args
        number = all(isinstance(other, int | float) for other in others) and isinstance(first, fx.Node)
        if not (number or (isinstance(first, int | float) and node.target is operator.mul)):
            self._obstacle(node, *(tensor for tensor in tensors if isinstance(tensor, _Value)))
        return value

    def _flatten(self, node: fx.Node, tensors: list[_Seen]) -> _Value:
        start = _argument(node, 1, "start_dim", 0)
        return self._flattened(node, tensors[0], start, _argument(node, 2, "end_dim", -1))

    def _flattened(self, node: fx.Node, value: _Seen, start: object, end: object) -> _Value:
        assert isinstance(value, _Value)  # noqa: S101 - for the type checker
        if start != 1 or end != -1:
            self._obstacle(node, value)
        return replace(value, kind="folded") if value.kind == "spatial" else value

    def _view(self, node: fx.Node, tensors: list[_Seen]) -> _Value:
        sizes = node.args[1:]
        if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
            sizes = tuple(sizes[0])
        value = next(tensor for tensor in tensors if isinstance(tensor, _Value))
        if len(sizes) != 2 or sizes[1] != -1:  # a size that is written out does not shrink with the model
            self._obstacle(node, value)
        return replace(value, kind="folded") if value.kind == "spatial" else value

    def _mean(self, node: fx.Node, tensors: list[_Seen]) -> _Value:
        value = tensors[0]
        assert isinstance(value, _Value)  # noqa: S101 - for the type checker
        axes = _argument(node, 1, "dim", None)
        axes = set(axes) if isinstance(axes, tuple | list) else {axes}
        if value.kind != "spatial" or axes not in ({2}, {-1}, {2, 3}, {-1, -2}, {2, 3, 4}, {-1, -2, -3}):
            self._obstacle(node, value)
        return value if _argument(node, 2, "keepdim", False) else replace(value, kind="flat")

    def _concatenate(self, node: fx.Node, tensors: list[_Seen]) -> _Value:
        values = [tensor for tensor in tensors if isinstance(tensor, _Value)]
        kinds = {value.kind for value in values}
        axis = _argument(node, 1, "dim", 0)
        if len(values) != len(tensors) or axis != 1 or len(kinds) != 1 or kinds == {"folded"}:
            self._obstacle(node, *values)
        return _Value(
            tuple(slot for value in values for slot in value.slots),
            tuple(units for value in values for units in value.sources),
            values[0].kind,
        )

    # --- slots -------------------------------------------------------------------------------------------------------

    def _tensors(self, node: fx.Node) -> list[_Seen]:
        found = [self.values.get(argument) for argument in node.all_input_nodes]
        return [value for value in found if value is not None]

    def _obstacle(self, node: fx.Node, *values: _Value) -> None:
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        if node.op == "call_module":
            kind = type(self.module.get_submodule(str(node.target))).__name__
            self.obstacles.append((f"the layer {target!r} is a {kind}", _units(values)))
        else:
            self.obstacles.append((f"the model uses the function {target!r}", _units(values)))

    def _written(self, value: _Value) -> _Value:
        self.wrote.append((value.slots, value.sources))
        return value

    def _fresh(self, count: int) -> tuple[int, ...]:
        start = len(self.parents)
        self.parents.extend(range(start, start + count))
        return tuple(range(start, start + count))

    def _root(self, slot: int) -> int:
        while self.parents[slot] != slot:
            self.parents[slot] = self.parents[self.parents[slot]]
            slot = self.parents[slot]
        return slot

    def _roots(self, slots: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._root(slot) for slot in slots)

    def _layer_of(self, unit: int) -> Layer:
        return next(layer for layer in self.layers if layer.first <= unit < layer.first + layer.units)


def _units(values: Iterable[_Seen]) -> frozenset[int]:
    found = (value for value in values if isinstance(value, _Value))
    return frozenset(unit for value in found for units in value.sources for unit in units)


def _argument(node: fx.Node, place: int, name: str, default: object) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)
