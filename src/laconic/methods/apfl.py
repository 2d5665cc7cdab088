"""APFL: every client predicts with a mixture of its own weights and FedAvg's, and learns how much of each.

| symbol | here |
|---|---|
| w | the server's weights; a client trains them as in FedAvg, bit for bit |
| v_i, α_i | a client's own weights and their share in what it predicts with (personal state); at first w and `alpha` |
| η | learning rate of the round |

    v̄_i = α_i v_i + (1 − α_i) w
    client, in every local step:  w by ∇_w L_i(w),  v_i by ∇_v L_i(v̄_i)
            once in a local update, if `adaptive`:  α_i ← α_i − η ∂L_i(v̄_i)/∂α_i,  within [0, 1]

The derivative is that of the first mini-batch, where w is still the server's: after a few steps w fits the client's
data better than v̄_i, whose steps are shorter, and α_i would go to 0. (The authors' code does the same.)

Deng et al., "Adaptive personalized federated learning", 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from laconic.core import ConfigError, Task, Tree, prefixed, subtree
from laconic.methods.em import Companion, Fitted, Learnt
from laconic.methods.solvers import Solver


@dataclass
class Blend:
    """v̄ while a client trains: a `Side`."""

    task: Task
    alpha: Tensor
    own: Tree
    buffers: Tree
    parameters: list[Tensor]
    slope: Tensor | None = None
    """∂L(v̄)/∂α on the first mini-batch."""

    def before_step(self, x: Tensor, protected: Tensor | None) -> None:
        """Nothing."""

    def loss(self, forward: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, protected: Tensor | None) -> Tensor:
        """L(w) + L(v̄), with the same draw of dropout in both: FedAvg's draws go on as if nothing had been between."""
        module, draws = self.task.module, torch.get_rng_state()
        shared = self.task.loss(forward(x), y)
        weights = {name: leaf.detach() for name, leaf in module.named_parameters()}
        blend = {**weights, **mixed(self.alpha, self.own, weights), **self.buffers}
        torch.set_rng_state(draws)
        own = self.task.loss(self.task.forward(partial(torch.func.functional_call, module, blend), x), y)
        if self.slope is None:
            (self.slope,) = torch.autograd.grad(own, [self.alpha], retain_graph=True)
        return shared + (own - own.detach())  # the figure is FedAvg's, the gradients are those of both


def mixed(alpha: Tensor, own: Tree, shared: Tree) -> Tree:
    """α v + (1 − α) w."""
    return {name: alpha * leaf + (1 - alpha) * shared[name] for name, leaf in own.items()}


def blends(alpha: float, adaptive: bool, solver: Solver) -> Companion:
    """Own weights, trained along with FedAvg's; nothing of them is sent."""
    if not 0 <= alpha <= 1:
        raise ConfigError(f"apfl: alpha must lie in [0, 1], got {alpha}.")
    if solver.clip_norm is not None:
        raise ConfigError("apfl trains two models in one step, which clip_norm would clip as one: leave it out.")

    def side(centre: Tree, personal: Tree, task: Task) -> Blend:
        share = personal.get("alpha", torch.tensor(alpha)).to(task.device).clone().requires_grad_()
        start = {**centre, **subtree("v", personal)}
        own = {name: start[name].to(task.device).clone().requires_grad_() for name in task.trainable}
        buffers = {name: start.get(name, leaf).to(task.device).clone() for name, leaf in task.module.named_buffers()}
        return Blend(task, share, own, buffers, list(own.values()))

    def learn(seen: Fitted, task: Task, solver: Solver) -> Learnt:
        blend = cast(Blend, seen.side)
        state, share = {**blend.own, **blend.buffers}, blend.alpha.detach()
        if adaptive and blend.slope is not None:
            share = (share - seen.lr * blend.slope).clamp(0, 1)
        own = {name: state[name].detach().cpu() for name in task.moving}
        return Learnt({"alpha": share.cpu(), **prefixed("v", own)})

    def model(centre: Tree, personal: Tree, task: Task) -> Tree:
        own = subtree("v", personal)
        trained = {name: own[name] for name in task.trainable if own}
        return {**centre, **own, **mixed(personal.get("alpha", torch.tensor(alpha)), trained, centre)}

    return Companion(learn=learn, side=side, model=model)
