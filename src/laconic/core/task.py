"""A task: model, loss and metrics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.core.errors import ConfigError
from laconic.core.random import Key, isolated
from laconic.core.tree import Spec, Tree, spec_of

Precision = Literal["float32", "bfloat16"]
"""What a model computes in; weights, optimizers and messages are float32 in both."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""Mean loss of a mini-batch from the model's outputs and the targets."""
Metric = Callable[[Tensor, Tensor], Tensor]
"""One value per example from the model's outputs and the targets; evaluation takes the mean.

Where there is a target per token (`core.tokens`), a row is a token that counts. One with `of_mean` makes a number of
the mean (`perplexity`)."""


class Side(Protocol):
    """What a device learns beside the task, for itself: a local objective (`methods.objectives`).

    `protected` are the protected attributes of the examples, where the data has them.
    """

    @property
    def parameters(self) -> list[Tensor]:
        """Weights of its own that the local solver trains along with the model's."""
        ...

    def before_step(self, x: Tensor, protected: Tensor | None) -> None:
        """A step of its own before the model's."""
        ...

    def loss(self, forward: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, protected: Tensor | None) -> Tensor:
        """The whole loss of a mini-batch; `forward` is the model."""
        ...


@dataclass(eq=False)
class Private:
    """What one device keeps to itself while it computes: leaves of the model, and what it learns beside the task.

    The names are a task's; the values are those of whichever device the task is `held` for, and a fit leaves there what
    it made of them. `frozen` leaves are not trained.
    """

    leaves: dict[str, Tensor] = field(default_factory=dict)
    side: Side | None = None
    frozen: bool = False


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """1 where the largest output is the target's class, else 0."""
    return (output.argmax(dim=1) == target).float()


@dataclass(frozen=True)
class Task:
    """What is learnt: a model, the loss that trains it and the metrics that say how well.

    `build` makes the model; `initialize` sets its first weights from a key. Without it, the weights are those
    that the constructor draws, made a function of the key all the same. `initial` gives weights outright.

    The model's state is its parameters and its floating-point buffers (running statistics of normalisation
    layers); integer buffers keep the values of the constructor. With `precision = "bfloat16"` layers compute under
    autocast (`forward`); what they give is float32. `outputs` says how predictions are averaged: as
    probabilities (`logits`) or as they are (`values`). `architecture` says in words what `build` makes, for files.

    `private` are leaves that stay on a device (see `keeping`): `load` sets them, local training moves them, and to
    methods they are no part of the state. `side` is what a device learns beside the task. Both are those of the device
    that the task is `held` for.

    >>> task = Task(lambda: nn.Linear(2, 3))
    >>> {name: tuple(leaf.shape) for name, leaf in task.init(Key.from_seed(0)).items()}
    {'weight': (3, 2), 'bias': (3,)}
    """

    build: Callable[[], nn.Module]
    loss: Loss = F.cross_entropy
    metrics: Mapping[str, Metric] = field(default_factory=lambda: {"accuracy": accuracy})
    initialize: Callable[[nn.Module, Key], None] | None = None
    initial: Mapping[str, Tensor] | None = None
    device: str = "cpu"
    precision: Precision = "float32"
    outputs: Literal["logits", "values"] = "logits"
    architecture: Mapping[str, Any] | None = None
    own: Private = field(default_factory=Private, repr=False, compare=False)

    def init(self, key: Key) -> Tree:
        """The initial weights: a function of the key, or the given ones."""
        with isolated(key.fold_in("constructor")):
            module = self.build()
        if self.initialize is not None:
            self.initialize(module, key)
        state = {name: leaf.clone() for name, leaf in read_state(module).items() if name not in self.private}
        if self.initial is None:
            return state
        return _checked(self.initial, state)

    @property
    def module(self) -> nn.Module:
        """A working copy of the model: a scratch pad whose weights each user sets first (`load`). One per process."""
        return self._pad.module

    @cached_property
    def _pad(self) -> _Pad:
        module = self.fresh()
        own = {id(leaf): name for name, leaf in _state_of(module).items()}
        places: dict[str, _Place] = {}
        constants = []
        for owner in module.modules():
            for short, leaf in (*owner._parameters.items(), *owner._buffers.items()):
                if id(leaf) in own:
                    places.setdefault(own[id(leaf)], _Place(owner, short))
                elif leaf is not None:
                    constants.append(_Constant(owner, short, leaf.clone()))
        return _Pad(module, constants, {name: places[name] for name in own.values()})

    def load(self, state: Mapping[str, Tensor]) -> nn.Module:
        """The working copy with these weights, and with every other buffer as the constructor made it.

        Counters of batches and the like are no state: they must not go from one client's local update to the next.
        """
        copy_state(self._pad.state(), self.complete(state))
        for owner, name, value in self._pad.constants:
            owner._buffers[name] = value.clone()
        return self.module

    def state(self) -> Tree:
        """The working copy's own tensors (not copies), private leaves included."""
        return {name: leaf.detach() for name, leaf in self._pad.state().items()}

    def parameters(self) -> dict[str, Tensor]:
        """The working copy's parameters, those that are not trained included."""
        return {name: leaf for name, leaf in self._pad.state().items() if isinstance(leaf, nn.Parameter)}

    def has_layer(self, *kinds: type[nn.Module]) -> bool:
        """Whether the model has a layer of one of these kinds."""
        return any(issubclass(kind, kinds) for kind in self._kinds)

    @cached_property
    def _kinds(self) -> frozenset[type[nn.Module]]:
        return frozenset(type(layer) for layer in self.module.modules())

    @property
    def private(self) -> dict[str, Tensor]:
        """The leaves that stay on a device, with their values."""
        return self.own.leaves

    @property
    def side(self) -> Side | None:
        """What a device learns beside the task."""
        return self.own.side

    def complete(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A state with the private leaves, which methods do not see, put back in."""
        return {**state, **self.private} if self.private else state

    def keeping(self, names: Collection[str]) -> Task:
        """The same task for devices that keep some leaves to themselves.

        >>> task = Task(lambda: nn.Linear(2, 3))
        >>> list(task.keeping(["bias"]).spec)
        ['weight']
        """
        empty = {name: torch.zeros(self.spec[name].shape, dtype=self.spec[name].dtype) for name in names}
        kept = replace(self, own=Private(empty))
        kept.__dict__["_pad"] = self._pad  # one working copy per process is enough
        return kept

    @contextmanager
    def held(
        self, leaves: Mapping[str, Tensor] | None = None, side: Side | None = None, *, frozen: bool = False
    ) -> Iterator[None]:
        """Compute as one device: with its private leaves, and with what it learns beside the task.

        Tasks that were made of this one (`dataclasses.replace`) compute as that device, too.
        """
        own = self.own
        if side is not None and own.side is not None:
            raise ConfigError("a device learns one thing beside the task: a local objective, or a method's own.")
        before = (own.leaves, own.side, own.frozen)
        own.leaves = own.leaves if leaves is None else dict(leaves)
        own.side, own.frozen = side or own.side, frozen or own.frozen
        try:
            yield
        finally:
            own.leaves, own.side, own.frozen = before

    def forward(self, module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """What a model of this task gives, computed in the task's precision."""
        if self.precision == "float32":
            return module(x)
        with torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16):
            output = module(x)
        return output.float() if isinstance(output, Tensor) else output

    def of_means(self, means: Mapping[str, float]) -> dict[str, float]:
        """What means over predictions say, metric by metric: themselves, as a rule."""
        makers = {name: getattr(self.metrics.get(name), "of_mean", float) for name in means}
        return {name: makers[name](mean) for name, mean in means.items()}

    def fresh(self) -> nn.Module:
        """A new instance of the model, weights undefined until `write_state`."""
        with isolated(Key.from_seed(0)):
            module = self.build()
        return module.to(self.device)

    @cached_property
    def spec(self) -> Spec:
        """Names, shapes and dtypes of the model's state. What is not trained passes codecs exactly."""
        trained = set(self.trainable)
        return {
            name: replace(leaf, exact=name not in trained)
            for name, leaf in spec_of(read_state(self.module)).items()
            if name not in self.private
        }

    @cached_property
    def moving(self) -> Spec:
        """What a local update can change: all of the state but frozen parameters."""
        frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        return {name: leaf for name, leaf in self.spec.items() if name not in frozen}

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """Names of the leaves that gradients change; the other leaves are running statistics."""
        return tuple(name for name, p in self.module.named_parameters() if p.requires_grad and name not in self.private)


class _Constant(NamedTuple):
    """A buffer that is no state, as the constructor made it."""

    owner: nn.Module
    name: str
    value: Tensor


class _Place(NamedTuple):
    """Where a leaf of the state hangs."""

    owner: nn.Module
    name: str


class _Pad(NamedTuple):
    """A working copy, and where its leaves hang: going through a module's tree costs more than a small step."""

    module: nn.Module
    constants: list[_Constant]
    places: Mapping[str, _Place]

    def state(self) -> dict[str, Tensor]:
        """The leaves of the state."""
        found: dict[str, Tensor] = {}
        for name, (owner, short) in self.places.items():
            parameter = owner._parameters.get(short)
            leaf = owner._buffers[short] if parameter is None else parameter
            found[name] = leaf  # type: ignore[assignment]
        return found


def _unbound() -> nn.Module:
    raise RuntimeError("this method has no task yet: bind(task, population) gives it one.")


UNBOUND = Task(_unbound)
"""The task of a method before it is bound."""


def read_state(module: nn.Module) -> Tree:
    """The module's own tensors (not copies): parameters, then floating-point buffers that are saved with it."""
    return {name: leaf.detach() for name, leaf in _state_of(module).items()}


def _state_of(module: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Tensor] = dict(module.named_parameters())
    saved = module.state_dict(keep_vars=True)
    for name, buffer in module.named_buffers():
        if name in saved and buffer.is_floating_point():
            state[name] = buffer
    return state


def write_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy a tree into a module."""
    copy_state(read_state(module), state)


def copy_state(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy a tree into a module's own tensors."""
    with torch.no_grad():
        torch._foreach_copy_(list(own.values()), [state[name] for name in own])


def _checked(given: Mapping[str, Tensor], own: Tree) -> Tree:
    missing = [name for name in own if name not in given]
    if missing:
        raise ConfigError(
            f"model.init has no weights for {missing[0]!r}"
            + (f" and {len(missing) - 1} more leaves" if len(missing) > 1 else "")
            + "; were they saved from another model?"
        )
    for name, leaf in own.items():
        if tuple(given[name].shape) != tuple(leaf.shape):
            raise ConfigError(
                f"model.init gives {name!r} the shape {tuple(given[name].shape)}, "
                f"but this model has {tuple(leaf.shape)}."
            )
    return {name: given[name].detach().to("cpu", leaf.dtype).clone() for name, leaf in own.items()}
