"""What evaluations at the end of a run compute where the clients' data are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from laconic.codecs.wire import HEADER_BYTES
from laconic.core import ClientInfo, Shared, predictions
from laconic.engine.round import SNAPSHOT, Score, evaluate
from laconic.engine.store import pack, unpack
from laconic.engine.workers import Station
from laconic.evaluations.probe import finetune, probe
from laconic.methods.solvers import Solver


class Outputs(NamedTuple):
    """What a client's model says of the common test set, and the bytes of its one upload."""

    outputs: bytes
    upload: int


@dataclass(frozen=True)
class Predict:
    """A client's own predictor on the whole common test set: one member of an ensemble."""

    client: ClientInfo
    personal: bytes
    small = False
    once = False

    def run(self, station: Station) -> Outputs:
        """What it says, and what having its model at the server would cost: a float32 frame of the client's part."""
        method = station.agreement.method
        predictor = station.local_model(self.client, self.personal).eval()
        personal = unpack(self.personal)
        part = personal if method.own_part is None else method.own_part(personal)
        payload, _ = SNAPSHOT.encode(part, Shared(station.agreement.client_key(self.client)), {})
        with torch.no_grad():
            task = method.task
            parts = (chunk.tensors() for chunk in station.test_chunks)
            outputs = [predictions(task.forward(predictor, x.to(task.device)).cpu(), y).output for x, y in parts]
        return Outputs(pack({"outputs": torch.cat(outputs)}), HEADER_BYTES + len(payload) if part else 0)


@dataclass(frozen=True)
class ProbeClient:
    """A fresh adversary on the representations that a client's model (the server's, without `personal`) gives."""

    client: ClientInfo
    layer: str
    personal: bytes | None
    small = False
    once = False

    def run(self, station: Station) -> dict[str, float]:
        """Its figures."""
        model = station.model_of(self.client, self.personal)
        key = station.agreement.client_key(self.client).fold_in("probe")
        return probe(model, self.layer, station.clients.client(self.client.id), key)


@dataclass(frozen=True)
class FineTune:
    """A client's model (the server's, without `personal`) after some epochs on its own data, on its own test data."""

    client: ClientInfo
    personal: bytes | None
    epochs: int
    lr: float
    batch_size: int
    small = False
    once = False

    def run(self, station: Station) -> Score:
        """Its score."""
        model = station.model_of(self.client, self.personal)
        key, data = (
            station.agreement.client_key(self.client).fold_in("finetune"),
            station.clients.client(self.client.id),
        )
        solver = Solver(lr=self.lr, local_epochs=self.epochs, batch_size=self.batch_size)
        task = station.agreement.method.task
        return evaluate(task, finetune(model, task, data, solver, key), data.test)
