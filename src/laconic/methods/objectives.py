"""Local objectives: what a device learns beside the task, for itself (Liang et al., 2020, Figure 1 b–d).

| symbol | here |
|---|---|
| h = ℓ_m(x) | the representation: the output of the last private layer |
| a_m | the objective's own network; it never leaves the device |
| μ, λ | `weight` |
| L_g, L_a | the task's loss, the adversary's |

* **autoencoder**: a_m decodes h → x; L_g + μ · mean (x − x̂)².
* **jigsaw**: the image is cut into 2 × 2 tiles that are put together in another order; a_m says from ℓ_m of that image
  which of the orders it was; L_g + μ · cross-entropy.
* **adversary**: min over ℓ, g and max over a of L_g − λ L_a, L_a = Σ over attributes of the binary cross-entropy of
  a(h) and the attribute. For every mini-batch: (i) a step of a on λ L_a with h held fixed; (ii) a step of ℓ and g on
  L_g − λ L_a with a held fixed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.core import (
    ClientData,
    ClientInfo,
    ConfigError,
    DataError,
    Key,
    Part,
    Task,
    Tree,
    isolated,
    not_negative,
    one_of,
    read_state,
    write_state,
)
from laconic.methods.solvers import Solver
from laconic.models.initial import initialize

Kind = Literal["supervised", "autoencoder", "jigsaw", "adversary"]


class Objective(Protocol):
    """A local objective before it meets a device."""

    def side(
        self, task: Task, tap: str, state: Tree, data: ClientData, solver: Solver, client: ClientInfo, key: Key
    ) -> LocalSide:
        """Its part in a local update, from the weights that the device kept (`{}` at first)."""
        ...


class LocalSide(Protocol):
    """A local objective at work: a `Side` whose weights can be kept, and which has metrics of its own."""

    @property
    def parameters(self) -> list[Tensor]:
        """Weights of its own that the local solver trains along with the model's."""
        ...

    def before_step(self, x: Tensor, protected: Tensor | None) -> None:
        """A step of its own before the model's."""
        ...

    def loss(self, forward: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, protected: Tensor | None) -> Tensor:
        """The whole loss of a mini-batch."""
        ...

    def state(self) -> Tree:
        """Its weights, to be kept on the device."""
        ...

    def metrics(self, part: Part) -> dict[str, float]:
        """What it says of itself after a local update."""
        ...


@dataclass(frozen=True)
class Autoencoder:
    """The representation must suffice to rebuild the input: μ · mean (x − x̂)² beside the task's loss."""

    weight: float = 1.0
    hidden: int = 128

    def __post_init__(self) -> None:
        _check_weight(self.weight)

    def side(
        self, task: Task, tap: str, state: Tree, data: ClientData, solver: Solver, client: ClientInfo, key: Key
    ) -> LocalSide:
        """With a decoder of one hidden layer."""
        x, h = _sample(task, tap, data)

        def decoder() -> nn.Module:
            return nn.Sequential(nn.Linear(h.numel(), self.hidden), nn.ReLU(), nn.Linear(self.hidden, x.numel()))

        return _Decoding(task, tap, _prepared(decoder, state, key, task.device), self.weight)


@dataclass(frozen=True)
class Jigsaw:
    """The representation must tell in which order the four tiles of an image lie: μ · cross-entropy."""

    weight: float = 1.0
    permutations: int = 24

    def __post_init__(self) -> None:
        _check_weight(self.weight)
        if not 2 <= self.permutations <= 24:
            raise ConfigError(f"permutations must lie between 2 and 24, got {self.permutations}.")

    def side(
        self, task: Task, tap: str, state: Tree, data: ClientData, solver: Solver, client: ClientInfo, key: Key
    ) -> LocalSide:
        """With a linear layer that names the order."""
        x, h = _sample(task, tap, data)
        if x.dim() != 3 or x.shape[1] % 2 or x.shape[2] % 2:
            raise ConfigError(f"jigsaw needs images whose sides are even, got inputs of shape {tuple(x.shape)}.")
        net = _prepared(lambda: nn.Linear(h.numel(), self.permutations), state, key, task.device)
        orders = torch.tensor(orders_of(self.permutations))
        return _Puzzling(task, tap, net, self.weight, orders, key.fold_in("jigsaw").torch())


@dataclass(frozen=True)
class Opponent:
    """How an adversary learns: as the paper has it, one step of SGD per mini-batch with the solver's learning rate.

    A stronger one takes several `steps`, with Adam (whose steps do not depend on λ), sees representations
    standardised over the mini-batch (so that nothing hides in a small scale), or has an `lr` of its own. Against a weak
    one a representation learns to fool it, not to forget. `weight_decay` keeps a strong one from learning a device's
    few examples by heart, which would leave nothing to learn from it about all others. `attributes` are the protected
    attributes that it guesses, by their numbers; all, unless given.
    """

    steps: int = 1
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float | None = None
    standardize: bool = False
    weight_decay: float = 0.0
    attributes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(number < 0 for number in self.attributes) or len(set(self.attributes)) < len(self.attributes):
            raise ConfigError(f"adversary.attributes must be different numbers ≥ 0, got {list(self.attributes)}.")
        one_of("adversary.optimizer", self.optimizer, ("sgd", "adam"))
        if self.steps < 1:
            raise ConfigError(f"adversary.steps must be at least 1, got {self.steps}.")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ConfigError(f"adversary.lr must be positive and finite, got {self.lr}.")
        not_negative("adversary.weight_decay", self.weight_decay)


@dataclass(frozen=True)
class Adversary:
    """The representation must not tell protected attributes: min over ℓ, g and max over a of L_g − λ L_a.

    a is a network of three hidden layers of `hidden` neurons (32 → 32 → 32 → 32 → 2 for UCI Adult: 3,234 parameters),
    trained as `opponent` says.
    """

    weight: float = 0.03
    hidden: int = 32
    opponent: Opponent = Opponent()

    def __post_init__(self) -> None:
        _check_weight(self.weight)
        if self.hidden < 1:
            raise ConfigError(f"an adversary needs hidden ≥ 1, got {self.hidden}.")

    def side(
        self, task: Task, tap: str, state: Tree, data: ClientData, solver: Solver, client: ClientInfo, key: Key
    ) -> LocalSide:
        """With the adversary that the device kept."""
        if data.train.protected is None:
            raise DataError("an adversary needs protected attributes, which these data do not have; adult has them.")
        _, h = _sample(task, tap, data)
        there = data.train.protected.shape[1]
        if absent := [number for number in self.opponent.attributes if number >= there]:
            raise ConfigError(
                f"adversary.attributes: there is no attribute {absent[0]}; the data have 0 to {there - 1}."
            )
        guessed = len(self.opponent.attributes) or there
        net = _prepared(lambda: adversary_net(h.numel(), guessed, self.hidden), state, key, task.device)
        return Contest(task, tap, net, self.weight, lr=solver.rate(round=client.round), opponent=self.opponent)


def objective_of(
    kind: Kind, *, weight: float | None, permutations: int, opponent: Opponent = Opponent()
) -> Objective | None:
    """An objective by its name; `None` is the supervised one."""
    if kind == "autoencoder":
        return Autoencoder(1.0 if weight is None else weight)
    if kind == "jigsaw":
        return Jigsaw(1.0 if weight is None else weight, permutations)
    if kind == "adversary":
        return Adversary(0.03 if weight is None else weight, opponent=opponent)
    return None


# --- at work ---------------------------------------------------------------------------------------------------------


@dataclass
class _AtWork:
    """What objectives at work have: a network of their own, which the local solver trains along with the model."""

    task: Task
    tap: str
    net: nn.Module
    weight: float

    @property
    def parameters(self) -> list[Tensor]:
        """The network's."""
        return list(self.net.parameters())

    def before_step(self, x: Tensor, protected: Tensor | None) -> None:
        """Nothing."""

    def state(self) -> Tree:
        """The network."""
        return _kept(self.net)

    def metrics(self, part: Part) -> dict[str, float]:
        """None."""
        return {}


class _Decoding(_AtWork):
    """An autoencoder's part in a local update."""

    def loss(self, forward: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, protected: Tensor | None) -> Tensor:
        """L_g + μ · mean (x − x̂)²."""
        with tapped(self.task.module, self.tap) as seen:
            loss = self.task.loss(forward(x), y)
        rebuilt = self.net(seen[0].flatten(1))
        return loss + self.weight * F.mse_loss(rebuilt, x.flatten(1))


@dataclass
class _Puzzling(_AtWork):
    """A jigsaw's part in a local update."""

    orders: Tensor
    random: torch.Generator

    def loss(self, forward: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, protected: Tensor | None) -> Tensor:
        """L_g + μ · cross-entropy of the order."""
        loss = self.task.loss(forward(x), y)
        chosen = torch.randint(len(self.orders), (len(x),), generator=self.random)
        h = representation(self.task.module, self.tap, shuffled(x, self.orders[chosen]), forward)
        return loss + self.weight * F.cross_entropy(self.net(h.flatten(1)), chosen.to(x.device))


@dataclass
class Contest(_AtWork):
    """An adversary's part in a local update: (i) `before_step` moves a, (ii) `loss` is what ℓ and g get."""

    lr: float
    opponent: Opponent = Opponent()

    @cached_property
    def _optimizer(self) -> torch.optim.Optimizer:
        kind = torch.optim.Adam if self.opponent.optimizer == "adam" else torch.optim.SGD
        # Of L_a itself, which λ stands before: a stronger λ does not make a weaker decay.
        decay = self.weight * self.opponent.weight_decay
        return kind(self.net.parameters(), lr=self.opponent.lr or self.lr, weight_decay=decay)

    @property
    def parameters(self) -> list[Tensor]:
        """None: the adversary has steps of its own."""
        return []

    def adversary_loss(self, h: Tensor, protected: Tensor) -> Tensor:
        """L_a = Σ over attributes of the mean binary cross-entropy."""
        h = h.flatten(1)
        if self.opponent.attributes:
            protected = protected[:, list(self.opponent.attributes)]
        if self.opponent.standardize:
            h = (h - h.mean(dim=0)) / (h.var(dim=0, correction=0) + 1e-5).sqrt()
        return F.binary_cross_entropy_with_logits(self.net(h), protected, reduction="none").mean(dim=0).sum()

    def adversary_gradients(self, h: Tensor, protected: Tensor) -> list[Tensor]:
        """∇_a λ L_a, with h held fixed."""
        loss = self.weight * self.adversary_loss(h.detach(), protected)
        return list(torch.autograd.grad(loss, list(self.net.parameters())))

    def before_step(self, x: Tensor, protected: Tensor | None) -> None:
        """(i): steps of a on λ L_a."""
        if protected is None or not self.weight:
            return
        with torch.no_grad():
            h = representation(self.task.module, self.tap, x)
        for _ in range(self.opponent.steps):
            for weight, gradient in zip(self.net.parameters(), self.adversary_gradients(h, protected), strict=True):
                weight.grad = gradient
            self._optimizer.step()
        self._optimizer.zero_grad()

    def loss(self, forward: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, protected: Tensor | None) -> Tensor:
        """(ii): L_g − λ L_a; nobody asks for gradients by a."""
        with tapped(self.task.module, self.tap) as seen:
            loss = self.task.loss(forward(x), y)
        if protected is None or not self.weight:
            return loss
        return loss - self.weight * self.adversary_loss(seen[0], protected)

    def metrics(self, part: Part) -> dict[str, float]:
        """Its loss on the device's examples after the local update."""
        if part.protected is None:
            return {}
        module = self.task.module.eval()
        with torch.no_grad():
            h = representation(module, self.tap, part.tensors()[0].to(self.task.device))
            protected = part.protected[part.index].to(self.task.device)
            return {"adversary_loss": float(self.adversary_loss(h, protected))}


def adversary_net(inputs: int, attributes: int, hidden: int = 32) -> nn.Module:
    """Three hidden layers, an output per attribute.

    >>> sum(p.numel() for p in adversary_net(32, 2).parameters())
    3234
    """
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(inputs, hidden), nn.ReLU()]
        inputs = hidden
    return nn.Sequential(*layers, nn.Linear(inputs, attributes))


# --- representations -------------------------------------------------------------------------------------------------


class _Reached(Exception):
    """The layer that was asked for has spoken."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


@contextmanager
def tapped(module: nn.Module, tap: str) -> Iterator[list[Tensor]]:
    """Listen to what a layer gives."""
    seen: list[Tensor] = []

    def listen(layer: nn.Module, inputs: object, output: object) -> None:
        seen.append(_said(output, tap))

    handle = module.get_submodule(tap).register_forward_hook(listen)
    try:
        yield seen
    finally:
        handle.remove()


def representation(module: nn.Module, tap: str, x: Tensor, forward: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """The output of a layer for some inputs; what comes after it is not computed.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> representation(net, "0", torch.zeros(5, 4)).shape
    torch.Size([5, 3])
    """

    def stop(layer: nn.Module, inputs: object, output: object) -> None:
        raise _Reached(_said(output, tap))

    handle = module.get_submodule(tap).register_forward_hook(stop)
    try:
        (forward or module)(x)
    except _Reached as reached:
        return reached.output
    finally:
        handle.remove()
    raise ConfigError(f"the layer {tap!r} takes no part in the model's computation.")


def _said(output: object, tap: str) -> Tensor:
    """What a layer gives; of several things (an LSTM's outputs and states) the first."""
    first = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(first, Tensor):
        raise ConfigError(f"the layer {tap!r} gives a {type(first).__name__}, which no local objective can read.")
    return first.float()


def orders_of(count: int) -> list[tuple[int, ...]]:
    """Orders of four tiles, each as far from those before it as can be (Hamming distance).

    >>> orders_of(4)
    [(0, 1, 2, 3), (1, 0, 3, 2), (2, 3, 0, 1), (3, 2, 1, 0)]
    """
    left = list(itertools.permutations(range(4)))
    chosen = [left.pop(0)]
    while len(chosen) < count:
        distances = [min(sum(a != b for a, b in zip(o, c, strict=True)) for c in chosen) for o in left]
        chosen.append(left.pop(distances.index(max(distances))))
    return chosen


def shuffled(x: Tensor, orders: Tensor) -> Tensor:
    """Images with their 2 × 2 tiles in another order, one order per image.

    >>> image = torch.tensor([[[[0.0, 1.0], [2.0, 3.0]]]])
    >>> shuffled(image, torch.tensor([[3, 2, 1, 0]]))
    tensor([[[[3., 2.],
              [1., 0.]]]])
    """
    count, channels, height, width = x.shape
    tiles = x.view(count, channels, 2, height // 2, 2, width // 2).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    tiles = tiles[torch.arange(count).unsqueeze(1), orders]
    tiles = tiles.view(count, 2, 2, channels, height // 2, width // 2).permute(0, 3, 1, 4, 2, 5)
    return tiles.reshape(count, channels, height, width)


def _sample(task: Task, tap: str, data: ClientData) -> tuple[Tensor, Tensor]:
    """One input and its representation, for their shapes."""
    x = data.train.x[data.train.index[:1]].to(task.device)
    module = task.module.eval()
    with torch.no_grad():
        return x[0], representation(module, tap, x)[0]


def _prepared(build: Callable[[], nn.Module], state: Tree, key: Key, device: str) -> nn.Module:
    with isolated(key):
        net = build()
    if state:
        write_state(net, state)
    else:
        initialize(net, key.fold_in("objective"))
    return net.to(device)


def _kept(net: nn.Module) -> Tree:
    return {name: leaf.cpu().clone() for name, leaf in read_state(net).items()}


def _check_weight(weight: float) -> None:
    not_negative("the weight of a local objective", weight)
