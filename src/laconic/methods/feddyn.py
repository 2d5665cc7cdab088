"""FedDyn: every client's loss gets a linear term that it learns, so that all of them have the same minimum.

| symbol | here |
|---|---|
| w, φ, Δ = φ − w | server's weights, client's weights, message |
| α | `alpha`: the precision of the Gaussian prior around w |
| λ_i = α u_i | the linear term of a client: its loss's gradient where its last fit ended (personal state: u_i) |
| h = α u | the server's mean of all λ_i, never sent (server state: u) |
| S/N | replies, as a share of all clients |

    client:  min_φ  L_i(φ) − ⟨λ_i, φ⟩ + (α/2)‖φ − w‖²,    λ_i ← λ_i − α Δ
    server:  u ← u − (S/N) mean Δ,    w ← w + mean Δ − u

Acar et al., "Federated learning based on dynamic regularization", 2021.
"""

from __future__ import annotations

import math

import torch

from laconic.core import ConfigError, Task, Tree, prefixed, subtree
from laconic.methods.em import Companion, Fitted, Learnt, zeros
from laconic.methods.solvers import Pull, Solver


def linear_terms(alpha: float) -> Companion:
    """The linear terms, beside a Gaussian prior of precision `alpha`: the bytes of FedAvg."""
    if not 0 < alpha < math.inf:
        raise ConfigError(f"feddyn: alpha must be positive and finite, got {alpha}; for alpha = 0 there is fedavg.")

    def pull(_: Tree, personal: Tree, task: Task) -> Pull | None:
        own = subtree("u", personal) or zeros(task)
        terms = [own[name].to(task.device) for name in task.trainable]
        return Pull(lambda _, gradients: torch._foreach_add_(gradients, terms, alpha=-alpha))

    def learn(seen: Fitted, task: Task, solver: Solver) -> Learnt:
        own = subtree("u", seen.personal) or zeros(task)
        return Learnt(prefixed("u", {name: leaf - seen.delta[name] for name, leaf in own.items()}))

    def step(u: Tree, sent: Tree, shift: Tree, share: float) -> tuple[Tree, Tree]:
        new = {name: leaf - share * shift[name] for name, leaf in u.items()}
        return new, {name: leaf - new[name] if name in new else leaf for name, leaf in shift.items()}

    return Companion(learn=learn, init=zeros, sends=False, pull=pull, step=step)
