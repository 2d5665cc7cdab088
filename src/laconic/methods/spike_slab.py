"""The spike-and-slab prior: a gate per group of weights, which is open (slab) or closed (spike at 0). FedSparse.

| symbol | here |
|---|---|
| w, w_s; φ = z ⊙ w | server's and client's weights; what a model computes with |
| z_sg ~ Bern(π_sg), prior θ_g | gate of group g; probabilities of being open, client's and server's |
| v, τ = softplus(v) | threshold parameter and threshold |
| T, β, γ, ζ | `temperature`; constants of the hard concrete distribution: 2/3, −0.1, 1.1 |
| λ0, λ, ξ, ε | `lambda0`, `lambda_`, `xi`, `epsilon` |
| m_g = ‖w_g‖ − τ_g | margin: θ_g = σ(m_g / T); norms are detached, only v learns from the gates |

A client minimises, with one sample z̃ of relaxed gates per mini-batch and R = P(z̃ > 0) = σ(m/T − β log(−γ/ζ)),

    mean NLL(z̃ ⊙ w_s) + (λ/2) Σ_g R_g ‖w_sg − w_g‖² + λ0 Σ_g c_g R_g − ξ Σ_g [R_g log θ_g + (1 − R_g) log(1 − θ_g)],

c_g = |g| (or 1), by SGD on w_s and Adamax on v_s. It then draws z_s ~ Bern(π_s) and sends z_s and the differences
w_s − w of the groups that are open. The server's M-step ascends along the one-sample estimates

    G_w = mean_s z_s (w_s − w)    (Adam),        G_v = −mean_s (z_s − θ) σ(v) / T    (Adamax),

whose expectations are the gradients. (The closed form w = Σ z_s w_s / Σ z_s, θ = mean_s z_s is there too; its
expectation is *not* the stationary point Σ π_s w_s / Σ π_s.) Then it closes for ever what has θ_g ≤ ε.

Louizos et al., "An expectation-maximization perspective on federated learning", 2021.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.core import (
    ALONE,
    UNBOUND,
    Artifact,
    Bound,
    ClientData,
    ClientInfo,
    ConfigError,
    Key,
    Leaf,
    Memory,
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
    same_leaves,
    subtree,
    write_state,
)
from laconic.methods.em import Weighting, differences, predictor, weight_of
from laconic.methods.server import ServerOptimizer
from laconic.methods.solvers import Latent, Pull, Solver, adamax_step, solve
from laconic.models.anatomy import leave_dense
from laconic.models.assemble import UNITS
from laconic.models.groups import Groups, Piece, find_groups
from laconic.models.surgery import plan, sliced

Sparsity = Literal["low", "mid", "high"]
PRESETS: Mapping[Sparsity, float] = {"low": 0.992, "mid": 1.74, "high": 5.22}
"""λ0 for the largest groups of a model, in units of what first pushes one shut: λ0·c = ξ·logit θ at the first θ.

Calibrated on CIFAR-10 and LeNet5-FS, where they are 2.85e-7, 5e-7 and 1.5e-6 (docs/methods/fedsparse.md).
"""

_BETA, _GAMMA, _ZETA = 2 / 3, -0.1, 1.1
_FIRST_THETA = 0.99
_REFERENCE_XI = 1e-4  # presets don't follow `xi`: without a prior's pull they would be nothing
_SMALLEST_THRESHOLD = 1e-6
_LOG_SMALLEST = math.log(1e-6)  # θ is kept this far from 0 and 1 under a logarithm
_ALIVE, _MARGINS, _GATES = "#alive", "#margins", "#gates"  # leaves of messages that are no model's


@dataclass(frozen=True)
class SpikeSlab:
    """A spike-and-slab prior: filters and neurons that do not pay are closed for good (Louizos et al., 2021).

    `sparsity` is a preset of `lambda0` for the model at hand; `lambda0` itself goes before it. `server = None` is the
    closed-form M-step.

    Down travel a bit per gate (alive or not) and, of alive groups only, the weights with their biases and channels of
    normalisation layers, and one number each for the thresholds; up a bit per alive gate and the differences of the
    groups whose gate came out open. Everything without a gate travels whole. The threshold goes as the margin
    m = ‖w_g‖ − τ_g, and exactly: a codec that rounds the weights then still leaves every θ where it was, while T makes
    v itself good for nothing after the slightest rounding.

    `prune = False` leaves gates with θ ≤ ε in the game; they are closed in predictions only. In every layer the group
    with the largest θ stays alive whatever its θ, with a warning: a network that is cut through learns nothing more.
    Layers with a leaf that matches a pattern of `dense` have no gates and travel whole; so do, with a warning, those
    that cannot be followed (an LSTM, attention, an embedding). `gates = "open"` forces all gates to 1, so that nothing
    is pruned and the weights move exactly as FedAdam's.
    """

    task: Task = UNBOUND
    _: KW_ONLY
    sparsity: Sparsity = "mid"
    lambda0: float | None = None
    lambda_: float = 0.0
    xi: float = 1e-4
    temperature: float = 1e-3
    epsilon: float = 0.1
    l0_count: Literal["params", "groups"] = "params"
    structured: bool = True
    gate_output: bool = False
    prune: bool = True
    dense: tuple[str, ...] = ()
    gates: Literal["sampled", "open"] = "sampled"
    threshold_lr: float = 1e-3
    server: ServerOptimizer | None = ServerOptimizer("adam", lr=0.01)
    thresholds: ServerOptimizer = ServerOptimizer("adamax", lr=0.01)
    weighting: Weighting = "uniform"
    solver: Solver = Solver()

    link: ClassVar = ("float32", "float32")
    client_metrics: ClassVar = ("train_loss", "mean_pi", "open_gates")

    def __post_init__(self) -> None:
        one_of("sparsity", self.sparsity, tuple(PRESETS))
        for name in ("lambda0", "lambda_", "xi"):
            not_negative(name, getattr(self, name) or 0.0)
        for name in ("temperature", "threshold_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be finite and positive, got {getattr(self, name)}.")
        if not 0 <= self.epsilon < 1:
            raise ConfigError(f"epsilon must lie in [0, 1), got {self.epsilon}.")
        one_of("l0_count", self.l0_count, ("params", "groups"))
        one_of("gates", self.gates, ("sampled", "open"))
        one_of("weighting", self.weighting, get_args(Weighting))

    def bind(self, task: Task, population: Population = ALONE) -> Bound:
        """The method for a task; a model without gateable layers is refused here."""
        sparse = replace(self, task=task)
        groups = sparse.groups
        if groups.anatomy is not None:
            leave_dense("fedsparse", groups.anatomy.whole, instead="puts no gates on")
        return Bound.of(sparse, memory=Memory(part=sparse.alive_part))

    @cached_property
    def groups(self) -> Groups:
        """The gate groups of the task's model."""
        return find_groups(
            self.task.fresh(),
            structured=self.structured,
            gate_output=self.gate_output,
            only=self.task.spec if self.task.private else None,
            dense=self.dense,
        )

    @cached_property
    def counts(self) -> Tensor:
        """c_g, what λ0 is multiplied with: the weights of each group, or 1."""
        return self.groups.sizes if self.l0_count == "params" else torch.ones(self.groups.count)

    @cached_property
    def penalty(self) -> float:
        """λ0: the one given, or that of the preset for this model."""
        if self.lambda0 is not None:
            return self.lambda0
        first_push = _REFERENCE_XI * math.log(_FIRST_THETA / (1 - _FIRST_THETA)) / float(self.counts.max())
        return PRESETS[self.sparsity] * first_push

    # --- server ------------------------------------------------------------------------------------------------------

    def init(self, key: Key) -> Tree:
        """Weights as everyone's, thresholds such that θ = 0.99, all gates alive.

        A group whose norm is below T·logit(0.99) gets the smallest threshold instead, and a smaller θ.
        """
        weights = self.task.init(key)
        norms = self.groups.norms(weights, torch.float64)
        margin = self.temperature * math.log(_FIRST_THETA / (1 - _FIRST_THETA))
        return {
            **prefixed("w", weights),
            "v": inverse_softplus((norms - margin).clamp_(min=_SMALLEST_THRESHOLD)),
            "alive": torch.ones(self.groups.count, dtype=torch.bool),
        }

    def margins(self, server: Tree) -> Tree:
        """‖w_g‖ − τ_g and θ_g of every gate, dead ones included."""
        margins = self.groups.norms(subtree("w", server), torch.float64) - F.softplus(server["v"])
        return {"margin": margins, "theta": torch.sigmoid(margins / self.temperature)}

    def broadcast(self, server: Tree, client: ClientInfo, key: Key) -> Tree:
        """The alive groups and their margins; everything that has no gate."""
        alive = server["alive"]
        margins = self.margins(server)["margin"][alive].float()
        return {_ALIVE: alive, _MARGINS: margins, **self._packed(subtree("w", server), alive)}

    def broadcast_spec(self, client: ClientInfo, key: Key) -> Spec:
        """Vectors as long as the alive bits say."""
        groups = self.groups
        return {
            _ALIVE: Leaf((groups.count,), torch.bool),
            # T leaves no room for rounding them, and there are few.
            _MARGINS: Leaf((groups.count,), length=lambda tree: int(tree[_ALIVE].sum()), exact=True),
            **self._ragged(lambda tree: tree[_ALIVE], torch.ones(groups.count, dtype=torch.bool)),
        }

    def alive_part(self, held: Tree, spec: Spec, exact: Tree) -> Tree:
        """What a client holds of the groups that are still alive; it may hold plain weights, from rounds before."""
        start = self._unpacked(held) if _ALIVE in held else {name: held[name] for name in self.task.spec}
        return same_leaves(self._packed(start, exact[_ALIVE]), spec, exact)

    def server_update(self, server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        """M-step on weights and thresholds, then pruning: the state is always that of the start of a round."""
        weights, alive = subtree("w", server), server["alive"]
        sums = self._folded(weights, alive, replies)
        theta = self.margins(server)["theta"]
        if self.server is None:
            new_weights, new_v = self._closed_form(weights, sums)
            states: Tree = {}
        else:
            ascent = {name: leaf / sums.weight for name, leaf in sums.deltas.items()}
            trained = {name: d for name, d in ascent.items() if name in self.task.trainable}
            new_weights, state = self.server.step(weights, trained, subtree("optimizer", server))
            shift = self._averages(sums)
            new_weights |= {name: weights[name] + shift[name] for name in weights if name not in trained}
            v = server["v"]
            slope = -(sums.gates / sums.weight - theta) * torch.sigmoid(v) / self.temperature
            moved, v_state = self.thresholds.step({"v": v}, {"v": slope * alive}, subtree("thresholds", server))
            new_v = moved["v"]
            states = {**prefixed("optimizer", state), **prefixed("thresholds", v_state)}
        # Momentum must not bring back what is dead.
        new_weights = self.groups.masked({name: new_weights[name] for name in weights}, alive)
        new = {**prefixed("w", new_weights), "v": new_v, "alive": alive, **states}
        if not self.prune:
            return new
        standing = self.standing(new)
        return {**new, **prefixed("w", self.groups.masked(new_weights, standing)), "alive": standing}

    def standing(self, server: Tree) -> Tensor:
        """The gates that predict: alive and with θ > ε, and in every layer the strongest at least."""
        if self.gates == "open":
            return server["alive"].clone()
        margins = self.margins(server)["margin"]
        margins[~server["alive"]] = -math.inf
        standing = torch.sigmoid(margins / self.temperature) > self.epsilon
        for layer in self.groups.layers:
            if not bool(standing[layer.gates].any()):
                standing[layer.first + int(margins[layer.gates].argmax())] = True
                warnings.warn(
                    f"fedsparse: every group of {layer.name!r} has θ ≤ {self.epsilon}; the strongest one is kept. "
                    "Lower lambda0 if that is not what you want.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return standing

    def _folded(self, weights: Tree, alive: Tensor, replies: Iterable[Reply]) -> _Sums:
        """Σ_s z_s (w_s − w), Σ_s z_s and Σ_s 1, reply by reply."""
        pieces = self.groups.pieces
        deltas = {name: torch.zeros_like(leaf) for name, leaf in weights.items()}
        gates = torch.zeros(self.groups.count, dtype=torch.float64)
        total = 0.0
        for reply in replies:
            weight = weight_of(reply, self.weighting)
            opened = _spread(reply.message[_GATES], reply.received[_ALIVE])
            for name, leaf in deltas.items():
                sent = reply.message[name]
                if name in pieces:
                    sent = pieces[name].put(sent, pieces[name].present(opened))
                leaf.add_(sent, alpha=weight)
            gates += opened * weight
            total += weight
        return _Sums(deltas, gates, total)

    def _averages(self, sums: _Sums) -> Tree:
        """Σ_s z_s (w_s − w) / Σ_s z_s: the mean over the clients that sent a value, 0 where nobody did."""
        averages: Tree = {}
        for name, total in sums.deltas.items():
            piece = self.groups.pieces.get(name)
            if piece is None:
                averages[name] = total / sums.weight
                continue
            # Channels with several writers: the gate that was open most often stands for all.
            counts = torch.cat([sums.gates, sums.gates.new_tensor([sums.weight, 0.0])])[piece.owners].amax(dim=1)
            share = torch.where(counts > 0, 1 / counts, torch.zeros_like(counts)).to(total.dtype)
            averages[name] = piece.times(total, share)
        return averages

    def _closed_form(self, weights: Tree, sums: _Sums) -> tuple[Tree, Tensor]:
        """w = Σ z_s w_s / Σ z_s where anybody sent it; v such that θ = mean_s z_s, as far as τ > 0 allows."""
        shift = self._averages(sums)
        new = {name: leaf + shift[name] for name, leaf in weights.items()}
        theta = (sums.gates / sums.weight).clamp(1e-6, 1 - 1e-6)
        thresholds = self.groups.norms(new, torch.float64) - self.temperature * torch.logit(theta)
        return new, inverse_softplus(thresholds.clamp(min=_SMALLEST_THRESHOLD))

    # --- client ------------------------------------------------------------------------------------------------------

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        """E-step: fit weights and gates, draw the gates, keep what is open."""
        start = self._unpacked(received)
        alive = received[_ALIVE]
        module = self.task.load(start)
        posterior = GatePosterior.at(self, start, _spread(received[_MARGINS], alive, -math.inf), key)
        pull, latent = (posterior.pull, posterior.latent) if self.gates == "sampled" else (None, None)
        batches = key.fold_in("batches")
        fitted = solve(self.task, data.train, self.solver, round=client.round, key=batches, pull=pull, latent=latent)
        state = read_state(module)
        own = {name: state[name].cpu() for name in self.task.spec}
        pi = posterior.probabilities(own) if self.gates == "sampled" else alive.float()
        drawn = torch.rand(len(pi), generator=key.fold_in("posterior").torch()) < pi
        opened = drawn & alive
        message = {_GATES: opened[alive], **self._packed(differences(own, start), opened)}
        write_state(module, {**state, **self.groups.masked(own, opened)})
        return Update(
            message=message,
            personal=personal,
            fitted=module,
            metrics={
                "train_loss": fitted.loss,
                "mean_pi": float(pi[alive].mean()),
                "open_gates": float(opened.sum()),
            },
        )

    def message_spec(self, received: Tree) -> Spec:
        """Vectors as long as the gate bits say; the receiver knows which gates are alive."""
        alive = received[_ALIVE]
        return {
            _GATES: Leaf((int(alive.sum()),), torch.bool),
            **self._ragged(lambda tree: _spread(tree[_GATES], alive), alive),
        }

    # --- predictors and figures --------------------------------------------------------------------------------------

    def global_model(self, server: Tree) -> Predictor:
        """w ⊙ 1[θ > ε]: a physically smaller network where gates are units, else one with zeros."""
        standing = self.standing(server)
        model = predictor(self.task, self.groups.masked(subtree("w", server), standing))
        anatomy = self.groups.anatomy
        if anatomy is None:
            return model
        return sliced(model, anatomy, plan(anatomy, self.groups.open_units(standing))).eval()

    def artifact(self, server: Tree) -> Artifact:
        """The units that are left and their weights, or weights with zeros where gates are no units."""
        state = read_state(self.global_model(server))
        if self.groups.anatomy is None:
            return Artifact("weights", state)
        return Artifact("units", {UNITS: self.groups.open_units(self.standing(server)), **state})

    def local_model(self, received: Tree, personal: Tree) -> Predictor:
        """What was received, as it is: no client keeps anything. (`Update.fitted` is z_s ⊙ w_s.)"""
        return predictor(self.task, self._unpacked(received))

    def metrics(self, server: Tree) -> dict[str, float]:
        """Weights that closed gates remove / all weights (the paper's sparsity), the share of closed gates per layer,
        gates that stand, mean θ of alive gates. Units that are cut take weights of the next layer along, so that the
        model's own sparsity is larger."""
        standing, theta = self.standing(server), self.margins(server)["theta"]
        values = sum(leaf.size for leaf in self.task.spec.values())
        found = {"alive_groups": float(standing.sum()), "mean_theta": float(theta[server["alive"]].mean())}
        removed = 0
        for piece in self.groups.pieces.values():
            removed += int((~piece.present(standing)).sum()) * piece.size
        found["removed"] = removed / values
        for layer in self.groups.layers:
            found[f"closed/{layer.name}"] = float((~standing[layer.gates]).float().mean())
        return found

    def paper_bytes(self, received: Tree, message: Tree) -> int:
        """Four bytes per weight that is sent, both ways; bits and thresholds are not counted."""
        own = {_ALIVE, _MARGINS, _GATES}
        return 4 * sum(leaf.numel() for tree in (received, message) for name, leaf in tree.items() if name not in own)

    # --- messages ----------------------------------------------------------------------------------------------------

    def _packed(self, tree: Tree, opened: Tensor) -> Tree:
        """Of gated leaves the values of open gates, as vectors; of free leaves everything."""
        pieces = self.groups.pieces
        return {
            name: pieces[name].taken(leaf, pieces[name].present(opened)) if name in pieces else leaf
            for name, leaf in tree.items()
        }

    def _unpacked(self, received: Tree) -> Tree:
        pieces, alive = self.groups.pieces, received[_ALIVE]
        return {
            name: pieces[name].put(received[name], pieces[name].present(alive)) if name in pieces else received[name]
            for name in self.task.spec
        }

    def _ragged(self, opened: Callable[[Tree], Tensor], possible: Tensor) -> Spec:
        spec: Spec = {}
        for name, leaf in self.task.spec.items():
            piece = self.groups.pieces.get(name)
            if piece is None:
                spec[name] = leaf
            else:
                most = int(piece.present(possible).sum()) * piece.size
                spec[name] = Leaf((most,), leaf.dtype, length=_Length(piece, opened))
        return spec


class _Sums(NamedTuple):
    """What the replies add up to."""

    deltas: Tree
    gates: Tensor
    weight: float


@dataclass(frozen=True, eq=False)
class _Length:
    """How many values of a leaf are sent, from the bits of a message."""

    piece: Piece
    opened: Callable[[Tree], Tensor]

    def __call__(self, exact: Tree) -> int:
        return int(self.piece.present(self.opened(exact)).sum()) * self.piece.size


class GatePosterior:
    """A client's gates while it fits: thresholds v_s, the draws z̃ of a mini-batch, and their gradients in closed form.

    Nothing here goes through autograd but the product z̃ ⊙ w: with g = ∂NLL/∂z̃ the threshold parameters get
    ∂/∂v = [g · 1[0 < s̄ < 1] (ζ − γ) s(1 − s)/β + R(1 − R)(λ0 c + (λ/2)‖w_s − w‖² − ξ log θ/(1 − θ))] · (−σ(v)/T).
    """

    def __init__(self, method: SpikeSlab, start: Tree, margins: Tensor, norms: Tensor, key: Key) -> None:
        self.method, self.groups, self.start = method, method.groups, start
        self.names = method.task.trainable
        self.device = method.task.device
        self.dead = torch.isinf(margins)
        self.v = inverse_softplus((norms - margins).masked_fill(self.dead, 1.0).clamp(min=_SMALLEST_THRESHOLD))
        x = margins / method.temperature
        odds = F.logsigmoid(x).clamp(min=_LOG_SMALLEST) - F.logsigmoid(-x).clamp(min=_LOG_SMALLEST)
        self.price = method.penalty * method.counts.to(self.device) - method.xi * odds
        """∂ penalty / ∂R_g, but for the drift."""
        self._step = adamax_step(self.v, method.threshold_lr)
        self._random = key.fold_in("gates").torch(self.device)

    @classmethod
    def at(cls, method: SpikeSlab, start: Tree, margins: Tensor, key: Key) -> GatePosterior:
        """Where a client begins: at the prior."""
        device = method.task.device
        start = {name: leaf.to(device) for name, leaf in start.items()}
        return cls(method, start, margins.to(device), method.groups.norms(start), key)

    @property
    def latent(self) -> Latent:
        """Its part in every mini-batch."""
        return Latent(draw=self._draw, learn=self._learn)

    @property
    def pull(self) -> Pull | None:
        """The drift term's part: λ R_g (w_sg − w_g)."""
        return Pull(gradient=self._drift_gradient) if self.method.lambda_ else None

    def logits(self, weights: Mapping[str, Tensor]) -> Tensor:
        """log α_g = (‖w_sg‖ − τ_sg) / T; −∞ for dead gates."""
        margins = self.groups.norms(weights) - F.softplus(self.v)
        return margins.div_(self.method.temperature).masked_fill_(self.dead, -math.inf)

    def probabilities(self, weights: Mapping[str, Tensor]) -> Tensor:
        """π_s."""
        return torch.sigmoid(self.logits({n: leaf.to(self.device) for n, leaf in weights.items()})).cpu()

    def _draw(self, weights: list[Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
        own = dict(zip(self.names, weights, strict=True))
        self._log_alpha = self.logits(own)
        uniform = torch.rand(len(self.v), generator=self._random, device=self.device).clamp_(1e-6, 1 - 1e-6)
        self._concrete = torch.sigmoid((torch.logit(uniform) + self._log_alpha) / _BETA)
        gates = hard(self._concrete).requires_grad_()
        stand_ins: dict[str, Tensor] = {}
        for layer in self.groups.layers:
            part = gates[layer.gates]
            for piece in (layer.weight, layer.bias):
                if piece is not None and piece.leaf in own:
                    stand_ins[piece.leaf] = piece.times(own[piece.leaf], part)
        if self.groups.followers:
            opened = gates.detach() > 0
            for piece in self.groups.followers:
                if piece.leaf in own:
                    present = piece.present(opened).to(gates.dtype)
                    stand_ins[piece.leaf] = piece.times(own[piece.leaf], present)
        return stand_ins, [gates]

    def _learn(self, weights: list[Tensor], gradients: list[Tensor]) -> None:
        slope = gradients[0] * hard_slope(self._concrete)
        opening = torch.sigmoid(self._log_alpha - _BETA * math.log(-_GAMMA / _ZETA))
        price = self.price
        if self.method.lambda_:
            own = dict(zip(self.names, weights, strict=True))
            price = price + self.method.lambda_ / 2 * self._distances(own)
            self._opening = opening
        slope += opening * (1 - opening) * price
        self._step(slope * torch.sigmoid(self.v) / -self.method.temperature)

    def _distances(self, weights: Mapping[str, Tensor]) -> Tensor:
        """‖w_sg − w_g‖²."""
        leaves = [layer.weight.leaf for layer in self.groups.layers]
        return self.groups.norms({name: weights[name] - self.start[name] for name in leaves}).square()

    def _drift_gradient(self, weights: list[Tensor], gradients: list[Tensor]) -> None:
        place = {name: i for i, name in enumerate(self.names)}
        for layer in self.groups.layers:
            i = place[layer.weight.leaf]
            drift = weights[i] - self.start[layer.weight.leaf]
            gradients[i] += layer.weight.times(drift, self.method.lambda_ * self._opening[layer.gates])


def hard(concrete: Tensor) -> Tensor:
    """Hard concrete gates: stretched to (γ, ζ), then clipped to [0, 1].

    >>> hard(torch.tensor([0.05, 0.5, 0.99]))
    tensor([0.0000, 0.5000, 1.0000])
    """
    return (concrete * (_ZETA - _GAMMA) + _GAMMA).clamp_(0, 1)


def hard_slope(concrete: Tensor) -> Tensor:
    """∂z̃/∂log α: 0 where the gate is clipped.

    >>> hard_slope(torch.tensor([0.05, 0.5]))
    tensor([0.0000, 0.4500])
    """
    stretched = concrete * (_ZETA - _GAMMA) + _GAMMA
    inside = (stretched > 0) & (stretched < 1)
    return inside * ((_ZETA - _GAMMA) / _BETA) * concrete * (1 - concrete)


def inverse_softplus(y: Tensor) -> Tensor:
    """v with softplus(v) = y, for y > 0.

    >>> F.softplus(inverse_softplus(torch.tensor([1e-6, 0.5, 30.0])))
    tensor([1.0000e-06, 5.0000e-01, 3.0000e+01])
    """
    return y + torch.log(-torch.expm1(-y))


def _spread(values: Tensor, alive: Tensor, fill: float = 0.0) -> Tensor:
    """Values of alive gates among all gates."""
    if len(values) == len(alive):
        return values
    spread = torch.full((len(alive),), fill, dtype=values.dtype)
    spread[alive] = values
    return spread
