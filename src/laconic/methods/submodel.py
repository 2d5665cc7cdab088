"""Federated dropout: every client of a round trains a smaller network, cut at random out of the server's. FedDrop.

In each layer exactly `floor(r · units)` filters or neurons are removed, with the columns of the layers that read them;
the client trains what is left as an ordinary dense network, and the server adds the differences that come back where
they belong: a coordinate moves by the mean over the clients that held it,

    G = Σ_s m_s (w_s − w) / max(1, Σ_s m_s),        m_s: 1 where client s held the coordinate.

Caldas et al., "Expanding the reach of federated learning by reducing client resource requirements", 2018; as the
baseline of Louizos et al., 2021.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from laconic.core import (
    ALONE,
    UNBOUND,
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
    one_of,
    prefixed,
    read_state,
    same_leaves,
    spec_of,
    subtree,
    write_state,
)
from laconic.methods.em import Weighting, differences, optimizer_step, predictor, weight_of
from laconic.methods.server import ServerOptimizer
from laconic.methods.solvers import Solver, solve
from laconic.models.anatomy import ALWAYS, Anatomy, Layer, dissect, leave_dense
from laconic.models.surgery import Cut, Plan, plan, slice_tree, sliced

_SEED = "#seed"  # the leaf of a broadcast that the sub-model is drawn from


@dataclass(frozen=True)
class SubModel:
    """Federated dropout: every client trains a sub-model without some of the units (Caldas et al., 2018).

    `server = None` is the closed-form M-step: w moves by the mean difference over those who held it.

    `first_rate` is for the layers that read the inputs (unless no others can be dropped), `conv_rate` and `fc_rate` for
    the others; the output layer loses nothing. Layers of one residual stream lose the same channels (`streams =
    "shared"`, at the largest of their rates), or none (`"kept"`: only what is inside blocks is dropped). With `scale` a
    layer's inputs are multiplied by units / kept units, as inverted dropout does, so that the whole model needs no
    scaling at prediction.

    Layers with a leaf that matches a pattern of `dense` lose nothing; nor do, with a warning, those that cannot be
    followed (an LSTM, attention, an embedding).

    The sub-model follows from eight bytes, the leaf `#seed` of the broadcast, which the server draws from the round's
    key and the client's number. Both ends cut the same tensors from it; no mask and no index travels, and sizes are the
    same for every seed, so that both ends know them beforehand.

    A coordinate that nobody held in a round stays with the closed form; under an optimizer with momentum it still
    moves by what the optimizer remembers. With all rates 0 every step is that of FedAvg or FedOpt, bit for bit.
    """

    task: Task = UNBOUND
    _: KW_ONLY
    conv_rate: float = 0.1
    fc_rate: float = 0.5
    first_rate: float = 0.01
    streams: Literal["shared", "kept"] = "shared"
    scale: bool = False
    dense: tuple[str, ...] = ()
    server: ServerOptimizer | None = ServerOptimizer("adam", lr=0.01)
    weighting: Weighting = "uniform"
    solver: Solver = Solver()

    link: ClassVar = ("float32", "float32")
    client_metrics: ClassVar = ("train_loss",)

    def __post_init__(self) -> None:
        for name in ("conv_rate", "fc_rate", "first_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must lie in [0, 1), got {getattr(self, name)}.")
        one_of("streams", self.streams, ("shared", "kept"))
        one_of("weighting", self.weighting, get_args(Weighting))

    def bind(self, task: Task, population: Population = ALONE) -> Bound:
        """The method for a task; a model without droppable layers, or with private ones, is refused here."""
        if task.private:
            raise ConfigError(
                "feddrop cuts units through the whole model, so no leaf of it can stay private; use another method."
            )
        drop = replace(self, task=task)
        _ = drop._streams
        leave_dense("feddrop", drop.anatomy.whole, instead="removes nothing of")
        memory = Memory(first=lambda server: subtree("w", server), part=drop.held_part, merge=drop.put_back)
        return Bound.of(drop, per_client=True, memory=memory)

    @cached_property
    def anatomy(self) -> Anatomy:
        """How the layers of the task's model follow each other."""
        return dissect(self._whole, self.dense)

    @cached_property
    def _whole(self) -> nn.Module:
        """A model that is only ever copied from."""
        return self.task.fresh()

    # --- the sub-model -----------------------------------------------------------------------------------------------

    def rate(self, layer: Layer) -> float:
        """The rate of a layer by itself, as the paper counts it."""
        if layer.output or layer.fixed:
            return 0.0
        if layer.inputs is None and self._deep:
            return self.first_rate
        return self.conv_rate if layer.convolution else self.fc_rate

    @cached_property
    def _deep(self) -> bool:
        """Whether anything but the layers that read the inputs can be dropped."""
        return any(layer.inputs is not None for layer in self._droppable)

    @cached_property
    def _droppable(self) -> list[Layer]:
        """The layers that may lose units."""
        return [layer for layer in self.anatomy.layers if not layer.output and not layer.fixed]

    @cached_property
    def _streams(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Slots that are dropped together, and how many of them."""
        hidden = self._droppable
        if not hidden:
            why = "".join(f"; {name!r} stays whole: {said}" for name, said in list(self.anatomy.whole.items())[:1])
            raise ConfigError(
                "this model has no droppable layer: nothing of Conv or Linear stands before the output layer"
                f"{why}. Put one there, or use a method that cuts no units, such as fedavg."
            )
        rates: dict[tuple[int, ...], float] = {}
        for layer in hidden:
            rates[layer.outputs] = max(self.rate(layer), rates.get(layer.outputs, 0.0))
        stay = {slot for layer in self.anatomy.layers if layer not in hidden for slot in layer.outputs}
        # What is added to a value that no unit writes (an embedding, say) has its channels for ever.
        stay |= {slot for slot, sources in self.anatomy.slot_sources.items() if ALWAYS in sources}
        streams = []
        for slots, rate in rates.items():
            others = {slot for other in rates if other != slots for slot in other}
            keep = bool(stay & set(slots))
            if not keep and others & set(slots):
                name = next(layer.name for layer in hidden if layer.outputs == slots)
                raise ConfigError(f"{name!r} shares only a part of its channels with other layers; it cannot be cut.")
            keep = keep or (self.streams == "kept" and bool(self.anatomy.shared_slots & set(slots)))
            streams.append((slots, 0 if keep else dropped(rate, len(slots))))
        return tuple(streams)

    def draw(self, seed: int) -> Plan:
        """The sub-model of a seed: the same on every machine."""
        random = Key.from_seed(seed).fold_in("submodel").numpy()
        present = dict.fromkeys(self.anatomy.slot_sources, True)
        for slots, count in self._streams:
            for place in random.permutation(len(slots))[:count]:
                present[slots[place]] = False
        kept = torch.tensor([present[slot] for layer in self.anatomy.layers for slot in layer.outputs])
        return plan(self.anatomy, kept, present)

    def _seed(self, client: ClientInfo, key: Key) -> int:
        # Seeds travel as signed integers of eight bytes.
        return key.fold_in("submodel", client.id).seed() >> 1

    # --- server ------------------------------------------------------------------------------------------------------

    def init(self, key: Key) -> Tree:
        """The weights, later the optimizer's state beside them."""
        return prefixed("w", self.task.init(key))

    def broadcast(self, server: Tree, client: ClientInfo, key: Key) -> Tree:
        """A client's own part of the weights, and the seed that says which part it is."""
        seed = self._seed(client, key)
        return {_SEED: torch.tensor([seed]), **slice_tree(subtree("w", server), self.draw(seed).cuts)}

    def held_part(self, held: Tree, spec: Spec, exact: Tree) -> Tree:
        """The sub-model of what a client holds, which is a whole model."""
        return same_leaves(slice_tree(held, self.draw(int(exact[_SEED])).cuts), spec, exact)

    def put_back(self, held: Tree, received: Tree) -> Tree:
        """The whole model that a client holds after its sub-model came."""
        cuts = self.draw(int(received[_SEED])).cuts
        return {name: cuts.get(name, Cut()).put(leaf, received[name]) for name, leaf in held.items()}

    def broadcast_spec(self, client: ClientInfo, key: Key) -> Spec:
        """Sizes don't depend on the seed."""
        return self._spec

    @cached_property
    def _spec(self) -> Spec:
        cuts = self.draw(0).cuts
        return {
            _SEED: Leaf((1,), torch.int64),
            **{
                name: replace(leaf, shape=cuts.get(name, Cut()).shape(leaf.shape))
                for name, leaf in self.task.spec.items()
            },
        }

    def server_update(self, server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
        """Add the differences where they belong, average over those who held a coordinate, and step."""
        weights = subtree("w", server)
        ascent = self._averages(weights, replies)
        if self.server is None:
            return prefixed("w", {name: leaf + ascent[name] for name, leaf in weights.items()})
        state = subtree("optimizer", server)
        new, state = optimizer_step(self.server, weights, ascent, state, self.task.trainable)
        return {**prefixed("w", new), **prefixed("optimizer", state)}

    def _averages(self, weights: Tree, replies: Iterable[Reply]) -> Tree:
        totals = {name: torch.zeros_like(leaf) for name, leaf in weights.items()}
        held: Tree = {}
        everyone = 0.0
        for weight, cuts, message in self._votes(replies):
            for name, total in totals.items():
                cut = cuts.get(name, Cut())
                cut.add_to(total, message[name], alpha=weight)
                if cut != Cut():
                    # One count per row and column is enough, for what is held is a product of both.
                    counts = held.setdefault(name, total.new_zeros(total.shape[:2] if total.dim() > 1 else total.shape))
                    cut.add_to(counts, counts.new_ones(cut.shape(tuple(counts.shape))), alpha=weight)
            everyone += weight
        for name, total in totals.items():
            if name in held:
                counts = held[name]
                counts = torch.where(counts > 0, counts, torch.ones_like(counts))
                total /= counts.view(*counts.shape, *(1,) * (total.dim() - counts.dim()))
            else:
                total /= everyone
        return totals

    def _votes(self, replies: Iterable[Reply]) -> Iterator[tuple[float, Mapping[str, Cut], Tree]]:
        for reply in replies:
            yield weight_of(reply, self.weighting), self.draw(int(reply.received[_SEED])).cuts, reply.message

    # --- client ------------------------------------------------------------------------------------------------------

    def client_update(self, received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
        """Train the smaller network."""
        small = self._small(received)
        task = replace(self.task, build=lambda: small)
        fitted = solve(task, data.train, self.solver, round=client.round, key=key.fold_in("batches"))
        return Update(
            message=differences(read_state(task.module), received),
            personal=personal,
            fitted=task.module,
            metrics={"train_loss": fitted.loss},
        )

    def message_spec(self, received: Tree) -> Spec:
        """A difference for every value that was received."""
        sizes = spec_of({name: leaf for name, leaf in received.items() if name != _SEED})
        return {name: replace(leaf, exact=self.task.spec[name].exact) for name, leaf in sizes.items()}

    def _small(self, received: Tree) -> nn.Module:
        """A network of the received size, with the received weights."""
        chosen = self.draw(int(received[_SEED]))
        small = sliced(self._whole, self.anatomy, chosen)
        write_state(small, received)
        if self.scale:
            for layer in self.anatomy.layers:
                factor = self._factor(layer, chosen.present)
                if factor is not None:
                    small.get_submodule(layer.name).register_forward_pre_hook(_Times(factor.to(self.task.device)))
        return small

    def _factor(self, layer: Layer, present: Mapping[int, bool]) -> Tensor | None:
        """units / kept units of the stream that each input of a layer is from."""
        if layer.inputs is None:
            return None
        factors = {slot: len(slots) / (len(slots) - count) for slots, count in self._streams for slot in slots}
        columns = [factors.get(slot, 1.0) for slot in layer.inputs if present[slot]]
        factor = torch.tensor(columns).repeat_interleave(layer.columns)
        if bool((factor == 1).all()):
            return None
        return factor.view(-1, *(1,) * (len(layer.shape) - 2))

    # --- predictors and figures --------------------------------------------------------------------------------------

    def global_model(self, server: Tree) -> Predictor:
        """The whole model."""
        return predictor(self.task, subtree("w", server))

    def local_model(self, received: Tree, personal: Tree) -> Predictor:
        """The client's part of the model."""
        return self._small(received).eval()

    def paper_bytes(self, received: Tree, message: Tree) -> int:
        """Four bytes per weight, both ways, as the paper counts: a removed unit takes its own weights with it (its
        row, bias and channel of the normalisation layer), but the columns that read it are counted as sent."""
        removed = 0
        for number, layer in enumerate(self.anatomy.layers):
            count = dropped(self.rate(layer), layer.units)
            size = math.prod(layer.shape[1:]) + layer.bias
            size += sum(norm.columns * 2 for norm in self.anatomy.norms if norm.follows == number)
            removed += count * size
        total = sum(leaf.size for name, leaf in self.task.spec.items() if name in self.task.trainable)
        return 2 * 4 * (total - removed)


def dropped(rate: float, units: int) -> int:
    """floor(rate · units), with the rate taken as it is written: 0.29 of 100 are 29.

    >>> dropped(0.29, 100), dropped(0.1, 32), dropped(0.01, 32)
    (29, 3, 0)
    """
    return math.floor(Fraction(str(rate)) * units)


@dataclass(frozen=True, eq=False)
class _Times:
    """Multiplies a layer's input."""

    factor: Tensor

    def __call__(self, layer: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (arguments[0] * self.factor, *arguments[1:])
