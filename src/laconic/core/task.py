"""A task: model, loss and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.core.errors import ConfigError
from laconic.core.random import Key, isolated
from laconic.core.tree import Spec, Tree, spec_of

Loss = Callable[[Tensor, Tensor], Tensor]
"""Mean loss of a mini-batch from the model's outputs and the targets."""
Metric = Callable[[Tensor, Tensor], Tensor]
"""One figure per example from the model's outputs and the targets; evaluation takes the mean."""


class Side(Protocol):
    """What a device learns beside the task, for itself: a local objective (`methods.objectives`).

    It sees the protected attributes of the examples, where the data has them, as `marks`.
    """

    @property
    def parameters(self) -> list[Tensor]:
        """Weights of its own that the local solver trains along with the model's."""
        ...

    def prepare(self, x: Tensor, marks: Tensor | None) -> None:
        """A step of its own before the model's."""
        ...

    def loss(self, forward: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, marks: Tensor | None) -> Tensor:
        """The whole loss of a mini-batch; `forward` is the model."""
        ...


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """1 where the largest output is the target's class, else 0."""
    return (output.argmax(dim=1) == target).float()


@dataclass(frozen=True)
class Task:
    """What is learnt: a model, the loss that trains it and the metrics that judge it.

    `build` makes the model; `initialize` sets its first weights from a key. Without it, the weights are those
    that the constructor draws, made a function of the key all the same. `initial` gives weights outright.

    The model's state is its parameters and its floating-point buffers (running statistics of normalisation
    layers); integer buffers keep the values of the constructor. `outputs` says how predictions are averaged: as
    probabilities (`logits`) or as they are (`values`). `architecture` says in words what `build` makes, for files.

    `private` are leaves that stay on a device, with their values (see `keeping`): `load` sets them, local training
    moves them, and to methods they are no part of the state. `side` is what a device learns beside the task.

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
    outputs: Literal["logits", "values"] = "logits"
    architecture: Mapping[str, Any] | None = None
    private: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)
    side: Side | None = field(default=None, repr=False, compare=False)

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
        own = {id(leaf) for leaf in _state_of(module).values()}
        constants = [
            _Constant(owner, name, buffer.clone())
            for owner in module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
            if id(buffer) not in own
        ]
        return _Pad(module, constants)

    def load(self, state: Mapping[str, Tensor]) -> nn.Module:
        """The working copy with these weights, and with every other buffer as the constructor made it.

        Counters of batches and the like are no state: they must not go from one client's turn to the next.
        """
        write_state(self.module, self.complete(state))
        for owner, name, value in self._pad.constants:
            owner._buffers[name] = value.clone()
        return self.module

    def complete(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A state with the private leaves, which methods do not see, put back in."""
        return {**state, **self.private} if self.private else state

    def keeping(self, private: Mapping[str, Tensor], side: Side | None = None) -> Task:
        """The same task for a device that keeps some leaves to itself.

        >>> task = Task(lambda: nn.Linear(2, 3))
        >>> list(task.keeping({"bias": torch.zeros(3)}).spec)
        ['weight']
        """
        kept = replace(self, private=private, side=side)
        shared = {"_pad": self._pad}  # one working copy per process, however many devices there are
        if private.keys() == self.private.keys():
            shared |= {name: getattr(self, name) for name in ("spec", "moving", "trainable")}
        kept.__dict__.update(shared)
        return kept

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
        """What a client's turn can change: all of the state but frozen parameters."""
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


class _Pad(NamedTuple):
    module: nn.Module
    constants: list[_Constant]


def bound_task(task: Task | None, method: str) -> Task:
    """The task that a method was bound to."""
    if task is None:
        raise RuntimeError(f"{method} has no task yet: call bind(task) first.")
    return task


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
    own = read_state(module)
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
