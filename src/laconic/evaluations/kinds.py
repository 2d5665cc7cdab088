"""What a run measures: objects that it is given. One of your own has `at_end` and `metrics`.

| evaluation | metrics | of what, on what |
|---|---|---|
| `Global` | `global_*`, `validation_*` | the server's model, on the common test set and on held-out training data |
| | `sparsity` | the share of its parameters that are gone, where some are |
| `Local` | `local_*`, `newcomer_*` | each client's own (or last fitted) model, on the client's own test data |
| `Ensemble` | `new_*`, `vote_*` | all clients' models together, on the common test set; at the end |
| `FineTuned` | `finetuned_*` | each client's model after some epochs on its data, on its test data; at the end |
| `Probe` | `auc`, `posthoc_auc_*` | what a layer's outputs give away of protected attributes; at the end |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from laconic.core import ClientInfo, ConfigError, DataError, Registry, Task, did_you_mean, predicted
from laconic.data import QUANTILES
from laconic.engine.round import Score, chunks
from laconic.engine.simulate import Evaluation, Metrics, Simulation
from laconic.engine.store import unpack
from laconic.engine.workers import Clients, EvaluateClient, EvaluateServer, Failure, Pool
from laconic.evaluations.jobs import FineTune, Predict, ProbeClient
from laconic.models import sparsity


@dataclass(frozen=True, kw_only=True)
class Global:
    """The server's model, on the common test set and on validation data, where there are any."""

    at_end: ClassVar[bool] = False

    def metrics(self, run: Simulation, pool: Pool, found: Mapping[str, Any]) -> Metrics:
        """`global_*` and `validation_*`; `sparsity`, in all and by layer."""
        task = run.method.task
        made: Metrics = dict(sparsity(run.method.global_model(run.state.server), task.module))
        for name, part in (("global", run.clients.test), ("validation", run.clients.validation)):
            count, held_out = len(chunks(part)), name == "validation"
            total = Score(0, {})
            for score in pool.map((EvaluateServer(i, held_out) for i in range(count)), count=count):
                total += score
            made |= {f"{name}_{metric}": value for metric, value in task.of_means(total.means()).items()}
        return made


@dataclass(frozen=True, kw_only=True)
class Local:
    """Every client's model on the client's own test data: its own model, or without one the model that it last fitted.

    A newcomer is told apart from the others.
    """

    at_end: ClassVar[bool] = False
    fitted: ClassVar[bool] = True

    def metrics(self, run: Simulation, pool: Pool, found: Mapping[str, Any]) -> Metrics:
        """`local_*`: means over clients, and how accuracy is spread; `newcomer_*`."""
        state, method, made = run.state, run.method, Metrics()
        if method.own_model:
            have = run.with_models()
            jobs = (EvaluateClient(ClientInfo(c, state.round, 0), state.personal.get(c, b"")) for c in have)
            scores = zip(have, pool.map(jobs, count=len(have)), strict=True)
            state.local |= {c: score for c, score in scores if not isinstance(score, Failure)}
        settled = run.population.settled
        of_each = [
            method.task.of_means(score.means())
            for c, score in sorted(state.local.items())
            if score.examples and c in settled
        ]
        if of_each:
            for name in of_each[0]:
                made[f"local_{name}"] = sum(means[name] for means in of_each) / len(of_each)
            made |= _distribution(of_each)
        made["local_clients"] = len(of_each)
        if run.population.newcomer is None:
            return made
        newcomer = len(settled)
        if not method.own_model or newcomer in run.with_models():
            at = ClientInfo(newcomer, state.round, 0)
            own = state.personal.get(newcomer, b"") if method.own_model else None
            (score,) = pool.map([EvaluateClient(at, own)], count=1)
            made |= {f"newcomer_{name}": value for name, value in method.task.of_means(score.means()).items()}
        return made


@dataclass(frozen=True, kw_only=True)
class Ensemble:
    """The mean of all clients' models, and their majority vote, on the common test set: LG-FedAvg's *new test*.

    `new_test_bytes_up` is what it would cost to bring the models together. Without models of their own, the clients'
    ensemble is the server's model.
    """

    at_end: ClassVar[bool] = True

    def metrics(self, run: Simulation, pool: Pool, found: Mapping[str, Any]) -> Metrics:
        """`new_*` and `vote_*`."""
        if not run.method.own_model:
            known = found if "global_loss" in found else Global().metrics(run, pool, found)
            same = {f"new_{n.removeprefix('global_')}": v for n, v in known.items() if n.startswith("global_")}
            return {**same, "new_test_bytes_up": 0}
        have = _members(run)
        jobs = (Predict(client, personal or b"") for client, personal in have)
        task, total, votes, models, upload = run.method.task, torch.zeros(()), torch.zeros(()), 0, 0
        for one in pool.map(jobs, count=len(have)):
            values = unpack(one.outputs)["outputs"].double()
            total, models, upload = total + values, models + 1, upload + one.upload
            if task.outputs == "logits":
                votes = votes + torch.nn.functional.one_hot(values.argmax(dim=1), values.shape[1])
        y, mean = predicted(run.clients.test.tensors()[1]), (total / models).float()
        made: Metrics = {"new_loss": float(task.loss(mean, y)), "new_test_models": models, "new_test_bytes_up": upload}
        for name, metric in task.metrics.items():
            found_now = task.of_means({name: float(metric(mean, y).sum()) / len(y)})
            made |= {f"new_{n}": value for n, value in found_now.items()}
            if task.outputs == "logits":
                # Where classes have as many votes, the larger mean output decides.
                voted = float(metric(votes + mean.double().softmax(dim=1) / 2, y).sum()) / len(y)
                made |= {f"vote_{n}": value for n, value in task.of_means({name: voted}).items()}
        return made


@dataclass(frozen=True, kw_only=True)
class FineTuned:
    """Every client's model (the server's, without own ones) after `epochs` of SGD on the client's training data."""

    epochs: int = 5
    lr: float = 0.05
    batch_size: int = 10
    at_end: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1 or not 0 < self.lr < math.inf:
            raise ConfigError(
                "finetuned: epochs and batch_size must be at least 1 and lr positive, "
                f"got {self.epochs}, {self.batch_size} and {self.lr}."
            )

    def metrics(self, run: Simulation, pool: Pool, found: Mapping[str, Any]) -> Metrics:
        """`finetuned_*`: means over clients."""
        have = _members(run)
        jobs = (FineTune(client, personal, self.epochs, self.lr, self.batch_size) for client, personal in have)
        task = run.method.task
        of_each = [task.of_means(score.means()) for score in pool.map(jobs, count=len(have)) if score.examples]
        return (
            {f"finetuned_{n}": sum(means[n] for means in of_each) / len(of_each) for n in of_each[0]} if of_each else {}
        )


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What the outputs of a layer give away: an adversary is fitted to them afresh, client by client."""

    layer: str
    at_end: ClassVar[bool] = True

    def check(self, task: Task, clients: Clients) -> None:
        """Refuse what would not be found out before the end of a run."""
        layers = [name for name, _ in task.module.named_modules() if name]
        if self.layer not in layers:
            raise ConfigError(f"probe: the model has no layer {self.layer!r}; {did_you_mean(self.layer, layers)}")
        if clients.client(0).train.protected is None:
            raise DataError("a probe needs protected attributes, which these data do not have; adult has them.")

    def metrics(self, run: Simulation, pool: Pool, found: Mapping[str, Any]) -> Metrics:
        """`auc` of the label, `posthoc_auc_*` of protected attributes: means over clients."""
        have = _members(run)
        jobs = (ProbeClient(client, self.layer, personal) for client, personal in have)
        values: dict[str, list[float]] = {}
        for one in pool.map(jobs, count=len(have)):
            for name, value in one.items():
                values.setdefault(name, []).append(value)
        return {name: sum(several) / len(several) for name, several in values.items()}


EVALUATIONS: tuple[Evaluation, ...] = (Global(), Local())
"""What a run measures that is not told otherwise."""
_KINDS: dict[str, Callable[..., Evaluation]] = {"global": Global, "local": Local, "ensemble": Ensemble}
_KINDS |= {"finetuned": FineTuned, "probe": Probe}
evaluations = Registry("evaluation", _KINDS, section="run.evaluations")
"""Every evaluation that a configuration can name: `"local"`, or `{ name = "probe", layer = "fc1" }`."""


def evaluation_of(named: Evaluation | str | Mapping[str, Any]) -> Evaluation:
    """An evaluation from how a configuration names it; an object of one's own is what it is.

    >>> evaluation_of({"name": "probe", "layer": "fc1"})
    Probe(layer='fc1')
    """
    if isinstance(named, str):
        return evaluations.build(named, {})
    if isinstance(named, Mapping):
        settings = dict(named)
        name = settings.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(f"run.evaluations: {dict(named)} needs a name; known: {', '.join(evaluations)}.")
        return evaluations.build(name, settings)
    if isinstance(named, type):
        raise ConfigError(f"run.evaluations: {named.__name__} is a class; make one: {named.__name__}().")
    if not all(hasattr(named, name) for name in ("at_end", "metrics")):
        raise ConfigError(f"run.evaluations: {named!r} is no evaluation; known: {', '.join(evaluations)}.")
    return named


def _members(run: Simulation) -> list[tuple[ClientInfo, bytes | None]]:
    """The clients that were there from the beginning; with personal states, where they have models of their own."""
    own, state = run.method.own_model, run.state
    return [
        (ClientInfo(c, state.round, 0), state.personal.get(c, b"") if own else None)
        for c in (run.with_models() if own else run.population.settled)
        if c in run.population.settled
    ]


def _distribution(of_each: Sequence[Mapping[str, float]]) -> Metrics:
    """How accuracy (the loss, where nothing else is measured) is spread over clients, the worst tenth among them."""
    name = "accuracy" if "accuracy" in of_each[0] else "loss"
    if name == "loss" and len(of_each[0]) > 1:
        return {}  # which end of a metric of the user's own is the bad one, only the user knows
    values = np.sort([means[name] for means in of_each])
    if not np.isfinite(values).all():
        return {}
    worst = values[::-1] if name == "loss" else values
    tenth = math.ceil(len(values) / 10)
    return {
        f"local_{name}_worst_decile": float(worst[:tenth].mean()),
        **{
            f"local_{name}_p{round(100 * q)}": float(value)
            for q, value in zip(QUANTILES, np.quantile(values, QUANTILES), strict=True)
        },
    }
