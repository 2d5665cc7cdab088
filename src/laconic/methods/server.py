"""A gradient M-step: any `torch.optim` optimizer on the server, its state kept in the server's tree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from laconic.core import ConfigError, Tree, did_you_mean, prefixed, subtree
from laconic.methods.solvers import adam_moments, adam_step

_PLAIN = frozenset({"sgd", "adam", "adamw", "adamax", "adagrad", "rmsprop"})  # known to need a gradient and no more
_NUMBER = "#"  # marks an entry of an optimizer's state that is a plain number


@dataclass(frozen=True)
class ServerOptimizer:
    """A `torch.optim` optimizer by name, driven by minus the ascent direction that the M-step gives.

    >>> step = ServerOptimizer("sgd", lr=1.0)
    >>> weights, state = step.step({"w": torch.zeros(2)}, {"w": torch.ones(2)}, {})
    >>> weights["w"]
    tensor([1., 1.])
    """

    name: str = "adam"
    lr: float = 0.01
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"the server optimizer's lr must be positive and finite, got {self.lr}.")
        if self.name.lower() in _PLAIN and not self.options:
            return  # nothing to go wrong; and the first use of any optimizer costs torch a second of imports
        # A trial step: some optimizers refuse options, others (LBFGS) need more than a gradient.
        trial = nn.Parameter(torch.zeros(2))
        trial.grad = torch.zeros(2)
        try:
            self._optimizer([trial]).step()
        except ConfigError:
            raise
        except Exception as error:
            said = str(error).split("\n")[0]
            raise ConfigError(f"server optimizer {self.name!r} cannot be used here: {said}.") from None

    def step(self, weights: Tree, ascent: Tree, state: Tree) -> tuple[Tree, Tree]:
        """New weights and new optimizer state from an ascent direction; the inputs stay as they are."""
        if self.name.lower() == "adam" and not self.options:
            return self._by_adam(weights, ascent, state)
        parameters = {name: nn.Parameter(weights[name].clone()) for name in ascent}
        optimizer = self._optimizer(list(parameters.values()))
        for path, value in state.items():
            name, entry = path.rsplit("/", 1)
            if entry.endswith(_NUMBER):
                optimizer.state[parameters[name]][entry.removesuffix(_NUMBER)] = value.item()
            else:
                optimizer.state[parameters[name]][entry] = value.clone()
        for name, parameter in parameters.items():
            parameter.grad = -ascent[name]
        optimizer.step()
        new_state: Tree = {}
        for name, parameter in parameters.items():
            for entry, value in optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    new_state[f"{name}/{entry}"] = value
                elif value is not None:
                    exact = torch.float64 if isinstance(value, float) else torch.int64
                    new_state[f"{name}/{entry}{_NUMBER}"] = torch.tensor(value, dtype=exact)
        return {name: parameter.detach() for name, parameter in parameters.items()}, new_state

    def _by_adam(self, weights: Tree, ascent: Tree, state: Tree) -> tuple[Tree, Tree]:
        new, new_state = {name: weights[name].clone() for name in ascent}, dict[str, Tensor]()
        for name, weight in new.items():
            moments = adam_moments(weight, subtree(name, state))
            adam_step(weight, -ascent[name], moments, self.lr)
            new_state |= prefixed(name, moments)
        return new, new_state

    def _optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        known: dict[str, Any] = {
            name.lower(): cls
            for name, cls in vars(torch.optim).items()
            if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and name != "Optimizer"
        }
        try:
            cls = known[self.name.lower()]
        except KeyError:
            hint = did_you_mean(self.name.lower(), known)
            raise ConfigError(f"unknown server optimizer {self.name!r}; {hint}") from None
        optimizer: torch.optim.Optimizer = cls(parameters, lr=self.lr, **self.options)
        return optimizer
