"""Variational dropout by synchronous SGD: a round is one iteration, and sparse gradients travel both ways.

| symbol | here |
|---|---|
| θ, log σ², M_i | `methods.variational` |
| g_i = M_i ⊙ ∇loss_i | what device i sends, from one mini-batch |
| ḡ = (1/N) Σ_i g_i, on the union U of the M_i | what the server sends back; a device that masks a value counts as 0 |

Every device holds the same θ and the same moments of Adam, and takes the same step with the same ḡ, so that nothing
but gradients ever travels (the first weights come from the run's key). That tree is what clients *hold* (`Replica`):
the engine keeps it once, and what goes down is ḡ, coded with the last union as side information. The server has no
replica of its own: it learns what devices hold from the broadcast that they answered, so a lossy way down moves all in
the same way. Every `check_every` steps the devices send checksums of θ, leaf by leaf: one that has diverged is refused
by name of the first leaf that differs.

`share_alpha = false`: log σ² stays with its device, which updates it by its own whole gradient; a weight that all have
masked may come back. `true` is the paper's Algorithm 1: log σ² is part of what devices hold, its gradient travels
beside θ's, and what all have masked is frozen for good.

Adam moves what has no gradient by its momentum; here it rests (value and moments) unless `ghost_updates`.

Du et al., "Efficient federated learning via variational dropout", 2018.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.core import (
    ALONE,
    UNBOUND,
    Bound,
    ClientData,
    ClientInfo,
    ConfigError,
    Key,
    Leaf,
    PayloadError,
    Population,
    Predictor,
    Replica,
    Reply,
    Spec,
    Task,
    Tree,
    Update,
    leaf_bytes,
    prefixed,
    read_state,
    subtree,
)
from laconic.methods.em import predictor
from laconic.methods.solvers import Solver
from laconic.methods.variational import (
    Dropout,
    Fold,
    Posterior,
    prior_gradient,
    put,
    refuse_weight_decay,
)
from laconic.models.order import in_quick_order

_STEP, _CHECKS = "#step", "#checks"
_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8
_DENSE = 0.2  # with more values than this, a step on all weights is quicker than one on those that move


class Moments(NamedTuple):
    """A parameter and Adam's moments of it."""

    value: Tensor
    first: Tensor
    second: Tensor

    def moved(self, gradient: Tensor, *, lr: float, count: int) -> Moments:
        """One step of Adam (Kingma & Ba, 2015), the `count`-th.

        >>> zero = torch.zeros(1)
        >>> Moments(zero, zero, zero).moved(torch.tensor([3.0]), lr=0.1, count=1).value
        tensor([-0.1000])
        """
        first = self.first.lerp(gradient, 1 - _BETA1)
        second = (self.second * _BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
        scale = (second.sqrt() / (1 - _BETA2**count) ** 0.5).add_(_EPSILON)
        return Moments(self.value.addcdiv(first, scale, value=-lr / (1 - _BETA1**count)), first, second)


@dataclass(frozen=True)
class Synchronous(Dropout):
    """Variational dropout as published: one mini-batch per device and round, all devices.

    The learning rate falls linearly to 0 over `decay_rounds` where that is given. A weight predicts if more than the
    share `vote` of devices keeps it: 0 is the union, which is what travels.
    """

    posterior: Posterior
    solver: Solver
    decay_rounds: int | None
    ghost_updates: bool
    vote: float
    check_every: int
    task: Task = UNBOUND

    link = ("mask", "mask")
    client_metrics = ("train_loss", "gradients_sent")

    def __post_init__(self) -> None:
        refuse_weight_decay(self.solver)
        if self.solver.momentum or self.solver.clip_norm is not None:
            raise ConfigError(
                "vardrop: momentum and clip_norm are for local_steps > 1; a synchronous step has neither."
            )
        if self.decay_rounds is not None and self.decay_rounds < 1:
            raise ConfigError(f"decay_rounds must be at least 1, got {self.decay_rounds}.")
        if not 0 <= self.vote < 1:
            raise ConfigError(f"vote is a share of devices and must lie in [0, 1), got {self.vote}.")
        if self.check_every < 1:
            raise ConfigError(f"check_every must be at least 1, got {self.check_every}.")

    def bind(self, task: Task, population: Population = ALONE) -> Bound:
        """The method for a task; layers without a variational form are refused here."""
        if task.private:
            raise ConfigError(
                "vardrop with local_steps = 1 sends gradients for replicas of one model, so no leaf of it can stay "
                "private; set local_steps to more than 1."
            )
        synchronous = replace(self, task=task)
        _ = synchronous.form
        replica = Replica(synchronous.first_held, synchronous.step_spec, synchronous.absorb, synchronous.verify)
        return Bound.of(synchronous, personal=True, own_model=True, replica=replica)

    @property
    def _adam(self) -> bool:
        return self.solver.optimizer == "adam"

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 1."""
        left = 1.0 if self.decay_rounds is None else max(0.0, 1 - (step - 1) / self.decay_rounds)
        return self.solver.rate(round=step) * left

    # --- what devices hold -------------------------------------------------------------------------------------------

    def init(self, key: Key) -> Tree:
        """What devices hold at first, and a step that is none."""
        form, weights = self.form, self._first(key)
        zeros = {name: torch.zeros_like(weights[name]) for name in (form.trained if self._adam else ())}
        held = self._held(weights, zeros, zeros, form.whole_masks(), torch.zeros(2, dtype=torch.int64))
        nothing = {weight: torch.zeros(size, dtype=torch.bool) for weight, size in form.sizes.items()}
        still = {name: torch.zeros(leaf.shape, dtype=leaf.dtype) for name, leaf in form.moving.items()}
        return {
            **prefixed("held", held),
            **prefixed("sent", {_STEP: torch.zeros(2, dtype=torch.int64), **form.packed(still, nothing)}),
            **prefixed("kept", form.whole_masks()),
        }

    def _held(self, weights: Tree, first: Tree, second: Tree, union: Tree, step: Tensor) -> Tree:
        return {
            **prefixed("w", weights),
            **prefixed("first", first),
            **prefixed("second", second),
            **prefixed("union", union),
            _STEP: step,
        }

    def first_held(self, server: Tree) -> Tree:
        """The first weights, moments of 0, and no mask yet."""
        return subtree("held", server)

    def step_spec(self, held: Tree) -> Spec:
        """The number of the step, bits that are likely as the last union's, and as many values."""
        return {_STEP: Leaf((2,), torch.int64), **self.form.spec(subtree("union", held))}

    def broadcast_spec(self, client: ClientInfo, key: Key) -> Spec:
        """As `step_spec`, for whoever holds nothing."""
        return {_STEP: Leaf((2,), torch.int64), **self.form.spec(None)}

    def absorb(self, held: Tree, sent: Tree) -> Tree:
        """The step of every device: Adam (or SGD) with ḡ, at rest outside of the union."""
        form = self.form
        number, last = int(sent[_STEP][0]), int(held[_STEP][0])
        if number == last:
            return dict(held)
        if number != last + 1:
            raise PayloadError("step", f"step {number} cannot follow step {last}: frames were missed")
        lr = self.rate(number)
        weights, first, second = (subtree(kind, held) for kind in ("w", "first", "second"))
        union = form.support(sent)
        for name, gradient in ((name, sent[name]) for name in form.moving):
            if name not in form.trained:  # running statistics take the mean of the devices' changes
                weights[name] = weights[name] + gradient
                continue
            old = Moments(weights[name], first[name], second[name]) if self._adam else weights[name]
            mask = None if (owner := form.masked.get(name)) is None else union[owner]
            rate = lr * self.posterior.sigma_lr if name in form.sigmas else lr
            new = self._moved(old, gradient, mask, rate, number)
            if isinstance(new, Moments):
                weights[name], first[name], second[name] = new
            else:
                weights[name] = new
        return self._held(weights, first, second, union, sent[_STEP])

    def _moved(
        self, old: Moments | Tensor, gradient: Tensor, mask: Tensor | None, lr: float, count: int
    ) -> Moments | Tensor:
        shape = (old.value if isinstance(old, Moments) else old).shape
        rows: Tensor | None = None
        if mask is None or gradient.numel() == mask.numel():
            gradient, mask = gradient.reshape(shape), None
        elif self.ghost_updates or gradient.numel() > _DENSE * mask.numel():
            gradient = put(gradient, mask, torch.zeros(mask.shape, dtype=gradient.dtype)).reshape(shape)
            mask = None if self.ghost_updates else mask.reshape(shape)
        else:
            rows = mask.nonzero().squeeze(1)
        if not isinstance(old, Moments):
            if rows is None:
                return old.add(gradient, alpha=-lr)
            return old.reshape(-1).index_add(0, rows, gradient, alpha=-lr).reshape(shape)
        if rows is None:
            moved = old.moved(gradient, lr=lr, count=count)
            if mask is None:
                return moved
            return Moments(*(torch.where(mask, b, a) for a, b in zip(old, moved, strict=True)))
        part = Moments(*(leaf.reshape(-1).index_select(0, rows) for leaf in old))
        moved = part.moved(gradient, lr=lr, count=count)
        return Moments(*(a.reshape(-1).index_copy(0, rows, b).reshape(shape) for a, b in zip(old, moved, strict=True)))

    def broadcast(self, server: Tree, client: ClientInfo, key: Key) -> Tree:
        """The newest step."""
        return subtree("sent", server)

    # --- a device ----------------------------------------------------------------------------------------------------

    def init_client(self, key: Key) -> Tree:
        """The seed of a device's order of examples; its own log σ² with Adam's moments of it."""
        own: Tree = {"#seed": torch.tensor(list(key.digest), dtype=torch.uint8)}
        if not self.posterior.share_alpha:
            first = self.form.first_sigmas()
            zeros = {name: torch.zeros_like(leaf) for name, leaf in first.items()}
            own |= {**prefixed("own", first), **prefixed("own_first", zeros), **prefixed("own_second", zeros)}
            own["#count"] = torch.zeros(1, dtype=torch.int64)
        return own

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        """The gradient of one mini-batch where the device's mask lets it through."""
        form, task = self.form, self.task
        step, examples = received[_STEP].tolist()
        weights = subtree("w", received)
        sigmas = self._sigmas(weights, personal)
        module = form.task.load({**weights, **sigmas}).train()
        batch = _stream(len(data.train), self.solver.batch_size, step, Key(bytes(personal["#seed"].tolist())))
        x, y = data.train.take(data.train.index[batch])
        form.noise.generator = key.fold_in("noise").torch(task.device)
        loss = task.loss(task.forward(in_quick_order(module), x.to(task.device)), y.to(task.device))
        form.noise.generator = None
        own = {name: p for name, p in module.named_parameters() if p.requires_grad}
        slopes = torch.autograd.grad(loss, list(own.values()), allow_unused=True, materialize_grads=True)
        local = len(data.train)
        size = examples if self.posterior.kl_size == "federation" and examples else local
        scale = self.posterior.kl_weight(step * len(batch) / local, size)
        with torch.no_grad():
            gradient = {name: slope.cpu() for name, slope in zip(own, slopes, strict=True)}
            for tree in prior_gradient(form, weights, sigmas, scale) if scale else ():
                gradient |= {name: gradient[name] + leaf for name, leaf in tree.items()}
            masks = form.masks(weights, sigmas)
            state = read_state(module)
            gradient |= {n: state[n].cpu() - weights[n] for n in form.moving if n not in form.trained}
            message = form.packed(gradient, masks)
            if self._checks_due(step):
                message[_CHECKS] = self._checksums(received)
            return Update(
                message=message,
                personal=self._own_step(personal, sigmas, gradient, step),
                metrics={"train_loss": float(loss.detach()), "gradients_sent": form.share_sent(masks)},
            )

    def _own_step(self, personal: Tree, sigmas: Tree, gradient: Tree, step: int) -> Tree:
        """A device moves its own log σ² by its whole gradient, masked weights included."""
        if self.posterior.share_alpha:
            return dict(personal)
        lr, count = self.rate(step + 1) * self.posterior.sigma_lr, int(personal["#count"]) + 1
        new = dict(personal)
        for name in self.form.sigmas:
            if self._adam:
                old = Moments(sigmas[name], personal[f"own_first/{name}"], personal[f"own_second/{name}"])
                moved = old.moved(gradient[name], lr=lr, count=count)
                new[f"own/{name}"], new[f"own_first/{name}"], new[f"own_second/{name}"] = moved
            else:
                new[f"own/{name}"] = sigmas[name].add(gradient[name], alpha=-lr)
        new["#count"] = torch.tensor([count])
        return new

    def message_spec(self, received: Tree) -> Spec:
        """Bits that are likely as the last union's, and as many values; checksums where they are due."""
        spec = self.form.spec(subtree("union", received))
        if self._checks_due(int(received[_STEP][0])):
            spec[_CHECKS] = Leaf((len(self._checked),), torch.int64)
        return spec

    # --- the server --------------------------------------------------------------------------------------------------

    def server_update(self, server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        """ḡ on the union of the supports: the next step."""
        fold, examples, held = Fold(self.form), 0, subtree("held", server)
        for reply in replies:
            held = reply.received
            fold.add(reply.message)
            examples += reply.client.examples
        step = torch.tensor([int(held[_STEP][0]) + 1, examples])
        return {
            **prefixed("held", held),
            **prefixed("sent", {_STEP: step, **self.form.packed(fold.means(), fold.kept_by(0))}),
            **prefixed("kept", fold.kept_by(self.vote)),
        }

    @property
    def _checked(self) -> tuple[str, ...]:
        return tuple(self.task.spec) + (self.form.sigmas if self.posterior.share_alpha else ())

    def _checks_due(self, step: int) -> bool:
        return step % self.check_every == 0

    def _checksums(self, held: Tree) -> Tensor:
        return torch.tensor([zlib.crc32(leaf_bytes(held[f"w/{name}"])) for name in self._checked])

    def verify(self, reply: Reply) -> None:
        """A device whose replica is another than the server's must not take part any more."""
        if _CHECKS not in reply.message:
            return
        same = reply.message[_CHECKS] == self._checksums(reply.received)
        for name, good in zip(self._checked, same.tolist(), strict=True):
            if not good:
                step = int(reply.received[_STEP][0])
                raise PayloadError(
                    "diverged", f"after step {step} the device's replica differs from the others', first in {name!r}"
                )

    def _weights(self, server: Tree) -> Tree:
        return subtree("w", self.absorb(subtree("held", server), subtree("sent", server)))

    def local_model(self, received: Tree, personal: Tree) -> Predictor:
        """θ where this device's own mask keeps it."""
        weights = subtree("w", received)
        masks = self.form.masks(weights, self._sigmas(weights, personal))
        return predictor(self.task, self._pruned(weights, masks))

    def paper_bytes(self, received: Tree, message: Tree) -> int:
        """Four bytes per value, both ways; bits are not counted. In the first round: the weights, and a gradient."""
        return 4 * (self.form.values_on(subtree("union", received)) + self.form.sent_values(message))


def _stream(examples: int, size: int, step: int, key: Key) -> Tensor:
    """The positions of a mini-batch: epoch after epoch in an order of its own, cut into pieces of one size.

    A batch may straddle two epochs: none is smaller than the others, so each counts the same in the mean.

    >>> [_stream(3, 2, step, Key.from_seed(0)).tolist() for step in range(3)]
    [[0, 2], [1, 2], [0, 1]]
    """
    size = min(size, examples)
    at = step * size
    epoch, start = divmod(at, examples)
    pieces: list[Tensor] = []
    while size:
        order = key.fold_in("epoch", epoch).numpy().permutation(examples)[start : start + size]
        pieces.append(torch.from_numpy(order))
        size, epoch, start = size - len(order), epoch + 1, 0
    return torch.cat(pieces)
