"""Local solvers: the one loop in which a client fits its weights.

A prior takes part through a `Pull`: it may add to the gradient before a step (Gaussian, mixture) and it may move the
weights after it (the proximal step of the Laplace prior). A prior with latent variables beside the weights (gates,
masks) takes part through a `Latent`: it draws them for every mini-batch and learns their distribution, beside the
weights or in their place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle, islice
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from laconic.core import ConfigError, Key, Part, Task, Tree, flat, prefixed, subtree
from laconic.methods.gradients import Chain
from laconic.models.order import in_quick_order

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_GATHERED = 1 << 22  # bytes of inputs that are gathered for several mini-batches
Step = Callable[[list[Tensor]], None]
"""Moves the weights by the gradients given."""


@flat
@dataclass(frozen=True, kw_only=True)
class Solver:
    """How a client fits its weights: optimizer, batch size, and how long.

    `local_epochs` passes over the client's data, or exactly `local_steps` mini-batches where that is given. The
    learning rate of round t (from 1) is `lr * lr_decay ** (t - 1)`. The optimizer starts afresh in every round.
    `clip_norm` shortens the loss's gradient to that length where it is longer: one client whose loss explodes would
    otherwise spoil the average for everybody.

    >>> Solver(lr=0.1, lr_decay=0.5).rate(round=3)
    0.025
    """

    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.2
    momentum: float = 0.0
    weight_decay: float = 0.0
    local_epochs: int = 5
    local_steps: int | None = None
    batch_size: int = 10
    lr_decay: float = 1.0
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        _require(self.optimizer in _STEPS, "optimizer", f"be one of {', '.join(_STEPS)}", self.optimizer)
        _require(0 < self.lr < math.inf, "lr", "be positive and finite", self.lr)
        _require(0 <= self.momentum < 1, "momentum", "lie in [0, 1)", self.momentum)
        _require(0 <= self.weight_decay < math.inf, "weight_decay", "be finite and not negative", self.weight_decay)
        _require(self.local_epochs >= 1, "local_epochs", "be at least 1", self.local_epochs)
        _require(
            self.local_steps is None or self.local_steps >= 1,
            "local_steps",
            "be at least 1",
            self.local_steps,
        )
        _require(self.batch_size >= 1, "batch_size", "be at least 1", self.batch_size)
        _require(0 < self.lr_decay <= 1, "lr_decay", "lie in (0, 1]", self.lr_decay)
        _require(self.clip_norm is None or 0 < self.clip_norm < math.inf, "clip_norm", "be positive", self.clip_norm)
        if self.optimizer == "adam" and self.momentum:
            raise ConfigError("momentum goes with optimizer = 'sgd'; adam has its own, leave momentum at 0.")

    def rate(self, *, round: int) -> float:
        """The learning rate of a round."""
        return self.lr * self.lr_decay ** (round - 1)


def sgd(*, lr: float = 0.2, momentum: float = 0.0, epochs: int = 5, batch_size: int = 10) -> Solver:
    """Plain or momentum SGD for some epochs."""
    return Solver(lr=lr, momentum=momentum, local_epochs=epochs, batch_size=batch_size)


def adam(*, lr: float = 1e-3, epochs: int = 5, batch_size: int = 10) -> Solver:
    """Adam for some epochs."""
    return Solver(optimizer="adam", lr=lr, local_epochs=epochs, batch_size=batch_size)


class Pull(NamedTuple):
    """A prior's part in a step; lists are the trainable leaves, in the task's order."""

    gradient: Callable[[list[Tensor], list[Tensor]], None] | None = None
    """(weights, gradients): adds the prior's gradient to `gradients`."""
    project: Callable[[list[Tensor], float], None] | None = None
    """(weights, learning rate): moves `weights` after the step."""


class Latent(NamedTuple):
    """Variables beside the weights, drawn anew for every mini-batch; lists are the trainable leaves, in order."""

    draw: Callable[[list[Tensor]], tuple[Mapping[str, Tensor], list[Tensor]]]
    """(weights): the leaves that stand in for the module's own, by name, and the draws that they depend on."""
    learn: Callable[[list[Tensor], list[Tensor]], list[Tensor] | None]
    """(weights, gradients by the draws): moves the distribution that draws come from."""
    trained: list[Tensor] | None = None
    """What the solver moves in the place of the module's weights, where draws stand in for all of them. It takes the
    weights' part everywhere, and `learn` gives the gradients by it."""


class Solved(NamedTuple):
    """What a local fit came to."""

    loss: float
    steps: int


@torch.no_grad()
def solve(
    task: Task,
    part: Part,
    solver: Solver,
    *,
    round: int,
    key: Key,
    pull: Pull | None = None,
    latent: Latent | None = None,
    memory: Tree | None = None,
    rates: Mapping[str, float] | None = None,
    private_only: bool = False,
) -> Solved:
    """Train `task.module` from the weights that it holds on one client's examples, in place.

    With `memory`, the optimizer goes on from what it holds, and leaves there what the next fit may go on from. `rates`
    gives some leaves a learning rate of their own, as a multiple of the solver's. Private leaves (and the weights of a
    local objective) are trained along, out of sight of `pull` and `latent`, unless they are frozen; `private_only`
    trains nothing else. What became of them is in `task.private` afterwards.
    """
    pull = pull or Pull()
    module = task.module.train()
    # Batch normalisation cannot be trained on one example: such a remainder of an epoch is passed over.
    smallest = 2 if task.has_layer(*_BATCH_NORMS) else 1
    named = {name: p for name, p in task.parameters().items() if p.requires_grad}
    reached: list[Tensor] = [] if private_only else [named[name] for name in task.trainable]
    shared = reached
    if latent is not None and latent.trained is not None:
        shared, reached = latent.trained, []
    beside: list[Tensor] = [] if task.own.frozen else [p for name, p in named.items() if name in task.private]
    if task.side is not None:
        beside += task.side.parameters
    weights = [*reached, *beside]
    lr = solver.rate(round=round)
    moved = [*shared, *beside]
    scales = None
    if rates is not None:
        names = {id(p): name for name, p in named.items()}
        scales = [rates.get(names.get(id(leaf), ""), 1.0) for leaf in moved]
    step = _STEPS[solver.optimizer](moved, lr, solver, memory, scales)
    by_hand = Chain.of(task, module, part, weights) if latent is None else None
    layers = in_quick_order(module)
    total, steps = torch.zeros((), device=task.device), 0
    for rows, x, y in _batches(part, solver, key, smallest=smallest, device=task.device):
        if by_hand is not None:
            loss, gradients = by_hand.gradients(x, y)
        else:
            with torch.enable_grad():
                forward, draws = partial(task.forward, layers), list[Tensor]()
                if latent is not None:
                    stand_ins, draws = latent.draw(shared)
                    forward = partial(task.forward, partial(_called, layers, dict(stand_ins)))
                if task.side is None:
                    loss = task.loss(forward(x), y)
                else:
                    protected = None if part.protected is None else part.protected[rows].to(task.device)
                    task.side.before_step(x, protected)
                    loss = task.side.loss(forward, x, y, protected)
                asked = [*weights, *draws]
                gradients = list(torch.autograd.grad(loss, asked, allow_unused=True, materialize_grads=True))
        if latent is not None:
            learnt = latent.learn(shared, gradients[len(weights) :])
            del gradients[len(weights) :]
            if learnt is not None:
                gradients = [*learnt, *gradients[len(reached) :]]
        if solver.clip_norm is not None:
            gradients = _clipped(gradients, solver.clip_norm)
        if pull.gradient is not None:
            # Autograd's own tensors may be views of each other (where weights are added up, say).
            gradients = [gradient.clone() for gradient in gradients]
            pull.gradient(shared, gradients[: len(shared)])
        step(gradients)
        if pull.project is not None:
            pull.project(shared, lr)
        total += loss.detach()
        steps += 1
    if task.private and not task.own.frozen:
        state = task.state()
        task.private.update({name: state[name].cpu().clone() for name in task.private})
    return Solved(float(total) / max(steps, 1), steps)


def _called(module: nn.Module, stand_ins: dict[str, Tensor], x: Tensor) -> Tensor:
    output: Tensor = torch.func.functional_call(module, stand_ins, (x,))
    return output


def _batches(
    part: Part, solver: Solver, key: Key, *, smallest: int, device: str
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Mini-batches: row numbers, inputs, targets. Many are gathered at once, which is quicker than one by one."""
    size, whole = solver.batch_size, len(part) // solver.batch_size
    lengths = [n for n in (*[size] * whole, len(part) % size) if n >= smallest]  # those of an epoch
    if not lengths:
        return
    left = solver.local_epochs * len(lengths) if solver.local_steps is None else solver.local_steps
    ahead = max(1, _GATHERED // max(1, size * part.x[:1].nbytes))
    orders = (key.fold_in("epoch", epoch).numpy().permutation(len(part))[: sum(lengths)] for epoch in count())
    positions, following = np.empty(0, np.int64), cycle(lengths)
    while left:
        sizes = list(islice(following, min(ahead, left)))
        left -= len(sizes)
        while len(positions) < sum(sizes):
            positions = np.concatenate([positions, next(orders)])
        rows = part.index[torch.from_numpy(positions[: sum(sizes)])]
        positions = positions[sum(sizes) :]
        gathered = (rows, *(leaf.to(device) for leaf in part.take(rows)))
        yield from zip(*(torch.split(leaf, sizes) for leaf in gathered), strict=True)


def _clipped(gradients: list[Tensor], limit: float) -> list[Tensor]:
    norm = torch.stack(torch._foreach_norm(gradients)).norm()
    scale = (limit / norm).clamp(max=1.0)
    # Times 1 changes no bit, and passing over every gradient is a notable part of a small step. NaN is not 1.
    return gradients if float(scale) == 1.0 else list(torch._foreach_mul(gradients, scale))


def _sgd_step(
    weights: list[Tensor], lr: float, solver: Solver, memory: Tree | None, scales: list[float] | None
) -> Step:
    velocity: list[Tensor] = [] if memory is None else [leaf.clone() for leaf in memory.values()]

    def step(gradients: list[Tensor]) -> None:
        # Not in place: autograd's own tensors may be views of each other.
        if solver.weight_decay:
            gradients = list(torch._foreach_add(gradients, weights, alpha=solver.weight_decay))
        if solver.momentum:
            if velocity:
                torch._foreach_mul_(velocity, solver.momentum)
                torch._foreach_add_(velocity, gradients)
            else:
                velocity.extend(gradient.clone() for gradient in gradients)
            gradients = velocity
            if memory is not None:
                memory.update({f"{i}/velocity": leaf for i, leaf in enumerate(velocity)})
        if scales is not None:
            gradients = list(torch._foreach_mul(gradients, scales))
        torch._foreach_add_(weights, gradients, alpha=-lr)

    return step


def _adam_step(
    weights: list[Tensor], lr: float, solver: Solver, memory: Tree | None, scales: list[float] | None
) -> Step:
    moments = [adam_moments(weight, subtree(str(i), memory or {})) for i, weight in enumerate(weights)]
    rates = [lr * scale for scale in scales or [1.0] * len(weights)]

    def step(gradients: list[Tensor]) -> None:
        for weight, gradient, own, rate in zip(weights, gradients, moments, rates, strict=True):
            if solver.weight_decay:
                gradient = gradient.add(weight, alpha=solver.weight_decay)
            adam_step(weight, gradient, own, rate)
        if memory is not None:
            for i, own in enumerate(moments):
                memory.update(prefixed(str(i), own))

    return step


def adam_moments(weight: Tensor, kept: Tree) -> Tree:
    """A weight's state under Adam: as it was kept, or at first."""
    if kept:
        return {name: leaf.clone() for name, leaf in kept.items()}
    return {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}


def adam_step(weight: Tensor, gradient: Tensor, moments: Tree, lr: float) -> None:
    """Move one weight, in place, by Adam (Kingma & Ba, 2015): the bits of `torch.optim.Adam` with its usual settings.

    Written out, for the first use of any of torch's optimizers costs a process a second of imports.

    >>> w = torch.zeros(2)
    >>> adam_step(w, torch.tensor([3.0, 0.0]), adam_moments(w, {}), lr=0.1)
    >>> w
    tensor([-0.1000,  0.0000])
    """
    first, second = moments["exp_avg"], moments["exp_avg_sq"]
    moments["step"] += 1
    steps = float(moments["step"])
    first.lerp_(gradient, 1 - 0.9)
    second.mul_(0.999).addcmul_(gradient, gradient, value=1 - 0.999)
    scale = (second.sqrt() / (1 - 0.999**steps) ** 0.5).add_(1e-8)
    weight.addcdiv_(first, scale, value=-(lr / (1 - 0.9**steps)))


def adamax_step(parameter: Tensor, lr: float) -> Callable[[Tensor], None]:
    """A function that moves one parameter, in place, by Adamax (Kingma & Ba, 2015) with its usual settings.

    >>> v = torch.zeros(2)
    >>> adamax_step(v, lr=0.1)(torch.tensor([3.0, 0.0]))
    >>> v
    tensor([-0.1000,  0.0000])
    """
    first, last, count = torch.zeros_like(parameter), torch.zeros_like(parameter), 0

    def step(gradient: Tensor) -> None:
        nonlocal count
        count += 1
        first.lerp_(gradient, 1 - 0.9)
        torch.maximum(last.mul_(0.999), gradient.abs().add_(1e-8), out=last)
        parameter.addcdiv_(first, last, value=-lr / (1 - 0.9**count))

    return step


_STEPS = {"sgd": _sgd_step, "adam": _adam_step}


def _require(condition: bool, name: str, must: str, got: object) -> None:
    if not condition:
        raise ConfigError(f"{name} must {must}, got {got!r}.")
