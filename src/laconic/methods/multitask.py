"""Mean-regularised multi-task learning: every device has a model of its own, pulled to the mean of all.

| symbol | here |
|---|---|
| W = (w_1 … w_M), w̄ | the devices' weights, their mean |
| λ1, λ2 | `lambda1`, `lambda2` |
| Ω = (I − 11ᵀ/M)² = I − 11ᵀ/M | the relation of the tasks |

    min_W Σ_m L_m(w_m) + λ1 tr(W Ω Wᵀ) + λ2 ‖W‖²  =  Σ_m L_m(w_m) + λ1 Σ_m ‖w_m − w̄‖² + λ2 Σ_m ‖w_m‖²,

whose gradient by w_m is ∇L_m + 2 λ1 (w_m − w̄) + 2 λ2 w_m, exactly, because Σ_m (w_m − w̄) = 0.

The code that was published with LG-FedAvg squares (1 − 11ᵀ/M) element by element, which makes Ω a constant matrix of
(1 − 1/M)² and the penalty λ1 (1 − 1/M)² ‖Σ_m w_m‖²: `omega = "published"`.

Evgeniou & Pontil, "Regularized multi-task learning", 2004; Smith et al., "Federated multi-task learning", 2017.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from laconic.core import (
    ALONE,
    UNBOUND,
    Bound,
    ClientData,
    ClientInfo,
    Key,
    Leaf,
    Population,
    Predictor,
    Reply,
    Spec,
    Task,
    Tree,
    Update,
    not_negative,
    one_of,
    prefixed,
    read_state,
    subtree,
)
from laconic.methods.em import differences, predictor
from laconic.methods.solvers import Pull, Solver, solve

Omega = Literal["mean", "published"]
_DEVICES = "#devices"


@dataclass(frozen=True)
class MultiTask:
    """Mean-regularised multi-task learning: own models, pulled to their mean (Evgeniou & Pontil, 2004).

    Down goes w̄, up goes the change of w_m since the device's last local update.

    A device starts from the w̄ of its first local update, so that w̄ + Σ_s Δ_s / (devices met so far) is the mean over
    all devices that ever took part; with every device in every round it is the mean over all M. (A lossy way up makes
    it an estimate.)
    """

    task: Task = UNBOUND
    _: KW_ONLY
    lambda1: float = 1e-7
    lambda2: float = 1e-7
    omega: Omega = "mean"
    solver: Solver = Solver()

    link: ClassVar = ("float32", "float32")
    client_metrics: ClassVar = ("train_loss",)

    def __post_init__(self) -> None:
        for name in ("lambda1", "lambda2"):
            not_negative(name, getattr(self, name))
        one_of("omega", self.omega, get_args(Omega))

    def bind(self, task: Task, population: Population = ALONE) -> Bound:
        """The method for a task."""
        tasks = replace(self, task=task)
        return Bound.of(tasks, personal=True, own_model=True)

    def init(self, key: Key) -> Tree:
        """w̄, and who was met."""
        return {**prefixed("w", self.task.init(key)), "met": torch.zeros(0, dtype=torch.int64)}

    def broadcast(self, server: Tree, client: ClientInfo, key: Key) -> Tree:
        """w̄; the number of devices too, where the penalty needs it."""
        if self.omega == "mean":
            return subtree("w", server)
        return {**subtree("w", server), _DEVICES: torch.tensor([len(server["met"])])}

    def broadcast_spec(self, client: ClientInfo, key: Key) -> Spec:
        """The model's leaves."""
        return self.task.spec if self.omega == "mean" else {**self.task.spec, _DEVICES: Leaf((1,), torch.int64)}

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        """Fit w_m from where it stood, under the penalty."""
        start = self._own(received, personal)
        module = self.task.load(start)
        devices = int(received[_DEVICES]) if self.omega == "published" else 0
        pull = self.pull(received, start, devices)
        fitted = solve(self.task, data.train, self.solver, round=client.round, key=key.fold_in("batches"), pull=pull)
        state = read_state(module)
        own = {name: state[name].detach().cpu().clone() for name in self.task.spec}
        return Update(
            message=differences({name: own[name] for name in self.task.moving}, start),
            personal=prefixed("own", own),
            fitted=module,
            metrics={"train_loss": fitted.loss},
        )

    def pull(self, mean: Tree, start: Tree, devices: int = 0) -> Pull | None:
        """2 λ1 (w_m − w̄) + 2 λ2 w_m; or, as published, 2 λ1 (1 − 1/M)² Σ_j w_j + 2 λ2 w_m."""
        if self.lambda1 == self.lambda2 == 0:
            return None
        names, device = self.task.trainable, self.task.device
        anchor = [mean[name].to(device) for name in names]
        before = [start[name].to(device) for name in names]
        scale = 2 * self.lambda1

        def gradient(weights: list[Tensor], gradients: list[Tensor]) -> None:
            if self.omega == "mean":
                torch._foreach_add_(gradients, torch._foreach_sub(weights, anchor), alpha=scale)
            elif devices:
                # Σ_j w_j = M w̄, with this device's own weights as they are now.
                shrink = (1 - 1 / devices) ** 2
                torch._foreach_add_(gradients, torch._foreach_sub(weights, before), alpha=scale * shrink)
                torch._foreach_add_(gradients, anchor, alpha=scale * shrink * devices)
            torch._foreach_add_(gradients, weights, alpha=2 * self.lambda2)

        return Pull(gradient=gradient)

    def message_spec(self, received: Tree) -> Spec:
        """A difference for every leaf that can move."""
        return self.task.moving

    def server_update(self, server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        """w̄ + Σ_s Δ_s / (devices met so far, these included)."""
        met = set(server["met"].tolist())
        total: Tree = {}
        for reply in replies:
            met.add(reply.client.id)
            total = {name: total[name] + leaf if total else leaf for name, leaf in reply.message.items()}
        mean = subtree("w", server)
        new = {name: leaf + total[name] / len(met) if name in total else leaf for name, leaf in mean.items()}
        return {**prefixed("w", new), "met": torch.tensor(sorted(met), dtype=torch.int64)}

    def global_model(self, server: Tree) -> Predictor:
        """The model at the mean."""
        return predictor(self.task, subtree("w", server))

    def local_model(self, received: Tree, personal: Tree) -> Predictor:
        """The device's own model; before its first local update, the mean."""
        return predictor(self.task, self._own(received, personal))

    def _own(self, received: Tree, personal: Tree) -> Tree:
        return subtree("own", personal) or {name: received[name] for name in self.task.spec}

    def own_part(self, personal: Tree) -> Tree:
        """The device's weights."""
        return subtree("own", personal)

    def metrics(self, server: Tree) -> Mapping[str, float]:
        """How many devices were met."""
        return {"devices_met": float(len(server["met"]))}
