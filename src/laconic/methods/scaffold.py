"""SCAFFOLD: control variates take the drift of unlike clients out of their local steps.

| symbol | here |
|---|---|
| w, φ, Δ = φ − w | server's weights, client's weights, message |
| c, c_i | control variates of the server (sent along with w) and of a client (personal state), zeros at first |
| s | `strength`; 1 in the paper, 0 is FedAvg, bit for bit |
| K, η | local steps, learning rate of the round |
| S/N | replies, as a share of all clients |

    client:  φ ← φ − η (∇L_i(φ) + s (c − c_i)),  K times
             c_i⁺ = s (c_i − c) − Δ/(K η)               the mean of its gradients; with s = 1 the paper's option II
    server:  w ← w + mean Δ,    c ← c + (S/N) mean (c_i⁺ − c_i)

Karimireddy et al., "SCAFFOLD: stochastic controlled averaging for federated learning", 2020.
"""

from __future__ import annotations

import torch

from laconic.core import ConfigError, Task, Tree, not_negative, prefixed, subtree
from laconic.methods.em import Companion, Fitted, Learnt, zeros
from laconic.methods.solvers import Pull, Solver


def control_variates(strength: float, solver: Solver) -> Companion:
    """Control variates for the leaves that gradients change: twice the bytes of FedAvg, both ways."""
    not_negative("scaffold: strength", strength)
    if solver.optimizer != "sgd" or solver.momentum:
        raise ConfigError("scaffold reads gradients off plain steps: set optimizer = 'sgd' and momentum = 0.")

    def correction(c: Tree, personal: Tree, task: Task) -> Tree:
        own = subtree("c", personal)
        return {name: strength * (c[name] - own[name] if own else c[name]) for name in task.trainable}

    def pull(c: Tree, personal: Tree, task: Task) -> Pull | None:
        added = [leaf.to(task.device) for leaf in correction(c, personal, task).values()]
        return Pull(lambda _, gradients: torch._foreach_add_(gradients, added)) if strength else None

    def learn(seen: Fitted, task: Task, solver: Solver) -> Learnt:
        own = subtree("c", seen.personal) or zeros(task)
        if not seen.steps:
            return Learnt(prefixed("c", own), zeros(task))
        added, path = correction(seen.beside, seen.personal, task), seen.steps * seen.lr
        new = {name: -leaf - seen.delta[name] / path for name, leaf in added.items()}
        return Learnt(prefixed("c", new), {name: leaf - own[name] for name, leaf in new.items()})

    def step(c: Tree, sent: Tree, shift: Tree, share: float) -> tuple[Tree, Tree]:
        return {name: leaf + share * sent[name] for name, leaf in c.items()}, shift

    return Companion(learn=learn, init=zeros, pull=pull, step=step)
