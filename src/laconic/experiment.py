"""From parts to a run: the one place where data, model, method and codecs meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic import codecs
from laconic.core import (
    ClientInfo,
    Codec,
    ConfigError,
    Key,
    Loss,
    Method,
    Metric,
    Task,
    accuracy,
    preferred_link,
    tree_sha256,
)
from laconic.data import Federation, digits, with_validation
from laconic.engine import Link, Newcomer, Observer, Run, RunDirectory, Schedule, Simulation, execute, settings_text
from laconic.methods import fedavg, methods
from laconic.models import initialize, load_state, models, named_scheme, user_model

Model = nn.Module | Callable[..., nn.Module] | str
"""A name of the catalogue, a module, something that makes one, or "module.path:Name"."""
CodecText = str | Sequence[str]
"""A codec as a configuration writes it."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What only a run on real machines needs.

    `deadline` is how many seconds a round may take: whoever has not answered by then is left out.
    """

    deadline: float = 600.0

    def __post_init__(self) -> None:
        if not 0 < self.deadline <= 1e6:
            raise ConfigError(
                f"deploy.deadline must be more than 0 and at most a million seconds, got {self.deadline}."
            )


@dataclass(frozen=True)
class Experiment:
    """A run that is ready to start: the simulation, and what its files will say about it."""

    simulation: Simulation
    name: str
    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    checkpoint_every: int = 10
    deployment: Deployment = Deployment()

    def run(
        self,
        *,
        out: Path | None = None,
        resume: bool = False,
        overwrite: bool = False,
        observer: Observer | None = None,
    ) -> Run:
        """Run to the end; with `out`, leave files in `out/name`."""
        return execute(
            self.simulation,
            self.config,
            facts=self.facts,
            directory=RunDirectory(out, self.name) if out is not None else None,
            resume=resume,
            overwrite=overwrite,
            checkpoint_every=self.checkpoint_every,
            observer=observer,
        )

    def finished(self, out: Path) -> bool:
        """Whether `out/name` holds this run, at its end; another run in its place is refused."""
        return RunDirectory(out, self.name).finished(self.config)


def make_task(
    federation: Federation,
    model: Model,
    settings: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
    init: Mapping[str, Tensor] | Path | str | None = None,
    device: str = "cpu",
) -> Task:
    """The task of learning `model` on a federation's data.

    `init` gives the first weights: a scheme ("torch", "glorot", "he", "torch:gain=1.15"), a safetensors file, or the
    weights themselves.
    """
    settings = dict(settings or {})
    initial: Mapping[str, Tensor] | None = None
    first_weights: Callable[[nn.Module, Key], None] | None = None
    outputs = federation.classes or federation.y[0].numel()
    if isinstance(model, str) and ":" not in model:
        recipe, given = models, (federation.shape, outputs)
        recipe.build(model, settings, given=given)  # what is wrong with it is said now

        def build() -> nn.Module:
            return recipe.build(model, settings, given=given)

        first_weights = initialize
    else:
        build, initial = user_model(model, settings)
    architecture: dict[str, Any] = {"shape": list(federation.shape), "outputs": outputs}
    if isinstance(model, str):
        architecture |= {"name": model, **({"settings": settings} if settings else {})}
    scheme = named_scheme(init) if isinstance(init, str) else None
    if scheme is not None:
        first_weights, initial = scheme, None
    elif init is not None:
        initial = load_state(Path(init)) if isinstance(init, str | Path) else init
    for name, leaf in (initial or {}).items():
        if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            raise ConfigError(f"model.init: {name!r} holds NaN or infinite values.")
    classification = federation.kind == "classification"
    task = Task(
        build,
        loss=loss or (F.cross_entropy if classification else F.mse_loss),
        initialize=first_weights,
        initial=initial,
        device=_checked_device(device),
        outputs="logits" if classification else "values",
        architecture=architecture,
        metrics=metrics if metrics is not None else {"accuracy": accuracy} if classification else {},
    )
    _try_out(task, federation)
    return task


def prepare(
    *,
    method: Method,
    task: Task,
    federation: Federation,
    schedule: Schedule,
    seed: int,
    up: CodecText | Codec | None = None,
    down: CodecText | Codec | None = None,
) -> Simulation:
    """A simulation from parts. A codec that is not given is the one that the method is made for."""
    preferred = preferred_link(method)
    link = Link(
        *(_codec(usual if given is None else given) for given, usual in zip((up, down), preferred, strict=True))
    )
    return Simulation(method, task, federation, link, schedule, seed=seed)


def _codec(codec: CodecText | Codec) -> Codec:
    return codecs.parse(codec) if isinstance(codec, str | Sequence) else codec


def experiment(
    *,
    data: Federation,
    model: Model = "mlp",
    method: Method | str = "fedavg",
    schedule: Schedule = Schedule(),  # noqa: B008
    seed: int = 0,
    up: CodecText | Codec | None = None,
    down: CodecText | Codec | None = None,
    loss: Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
    init: Mapping[str, Tensor] | Path | str | None = None,
    validation: float | None = None,
    device: str = "cpu",
    channels_last: bool = False,
    name: str = "run",
    checkpoint_every: int = 10,
    hashed: bool = True,
) -> Experiment:
    """A run from objects, ready to start. `hashed` for one that leaves files: they tell whether it is the same run."""
    if validation is not None:
        data = with_validation(data, fraction=validation, seed=seed)
    data = data.channels_last() if channels_last else data
    chosen = methods.build(method, {}) if isinstance(method, str) else method
    task = make_task(data, model, loss=loss, metrics=metrics, init=init, device=device)
    simulation = prepare(method=chosen, task=task, federation=data, schedule=schedule, seed=seed, up=up, down=down)
    named = model if isinstance(model, str) else _name(model)
    config: dict[str, dict[str, Any]] = {
        "run": {
            "name": name,
            "seed": seed,
            **asdict(schedule),
            "checkpoint_every": checkpoint_every,
            "device": device,
            "channels_last": channels_last,
        },
        "data": {"source": repr(data)},
        "model": {"name": named},
        "method": {"name": chosen.name, "settings": settings_text(chosen)},
        "link": {"up": simulation.agreement.link.up.text, "down": simulation.agreement.link.down.text},
    }
    if hashed:
        # Objects have no settings that could be compared when the run is resumed, so their contents are.
        config["data"]["sha256"] = _data_sha256(data)
        config["model"]["first_state_sha256"] = tree_sha256(simulation.state.server)
        config["model"]["loss"] = _name(task.loss)
    return Experiment(simulation, name, config, {"model": named, "data": data.name}, checkpoint_every)


def fit(
    *,
    data: Federation,
    model: Model = "mlp",
    method: Method | str = "fedavg",
    rounds: int = 30,
    cohort: int = 10,
    seed: int = 0,
    up: CodecText | Codec | None = None,
    down: CodecText | Codec | None = None,
    loss: Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
    init: Mapping[str, Tensor] | Path | str | None = None,
    eval_every: int = 5,
    min_replies: int = 1,
    local_eval: bool = True,
    workers: int | Literal["auto"] = "auto",
    store: Literal["memory", "disk"] = "memory",
    new_test: bool = False,
    newcomer: Newcomer | None = None,
    probe: str | None = None,
    validation: float | None = None,
    device: str = "cpu",
    channels_last: bool = False,
    out: Path | str | None = None,
    name: str = "run",
    resume: bool = False,
    overwrite: bool = False,
    checkpoint_every: int = 10,
    observer: Observer | None = None,
) -> Run:
    """Train a model across the clients of a federation, with every byte counted.

    With `out`, the run leaves its files in `out/name` and can be resumed. `up` and `down` are float32 unless given, or
    what the method is made for (`mask` for `fedpm`). `channels_last` makes convolutions on a CPU quicker. `validation`
    is the share of every client's training examples that is held out, to decide by.

    >>> import laconic as lc
    >>> run = lc.fit(method=lc.fedprox(mu=0.01), data=lc.data.digits(clients=10), rounds=2, cohort=5, workers=0)
    >>> len(run.history), run.summary["bits_per_parameter_up"] > 32
    (2, True)
    """
    schedule = Schedule(
        rounds=rounds,
        cohort=cohort,
        eval_every=eval_every,
        min_replies=min_replies,
        local_eval=local_eval,
        workers=workers,
        store=store,
        new_test=new_test,
        newcomer=newcomer,
        probe=probe,
    )
    return experiment(
        data=data,
        model=model,
        method=method,
        schedule=schedule,
        seed=seed,
        up=up,
        down=down,
        loss=loss,
        metrics=metrics,
        init=init,
        validation=validation,
        device=device,
        channels_last=channels_last,
        name=name,
        checkpoint_every=checkpoint_every,
        hashed=out is not None,
    ).run(out=Path(out) if out is not None else None, resume=resume, overwrite=overwrite, observer=observer)


def example_update() -> Tensor:
    """A real update as one vector: what a client of the digits sends after five epochs, with an MLP of 512 neurons."""
    federation = digits(clients=10)
    task = make_task(federation, "mlp", {"hidden": [512]})
    method, key = fedavg().bind(task), Key.from_seed(0)
    received = method.broadcast(method.init(key), ClientInfo(0, 1, 0), key)
    update = method.client_update(received, {}, federation.client(0), ClientInfo(0, 1, 0), key)
    return torch.cat([leaf.flatten() for leaf in update.message.values()])


def _name(thing: object) -> str:
    return getattr(thing, "__name__", type(thing).__name__)


def _data_sha256(data: Federation) -> str:
    tree = {"x": data.x, "y": data.y, "common": data.common}
    for name, rows in (("train", data.train_rows), ("test", data.test_rows)):
        tree |= {name: torch.from_numpy(rows.flat), f"{name}_offsets": torch.from_numpy(rows.offsets)}
    return tree_sha256(tree)


def _checked_device(device: str) -> str:
    try:
        float(torch.zeros(1, device=device))  # a value comes back: the meta device computes nothing
    except Exception as error:
        said = str(error).split("\n")[0].rstrip(".")
        raise ConfigError(f"run.device {device!r} cannot be used here: {said}.") from None
    return device


def _try_out(task: Task, federation: Federation) -> None:
    """One example through model and loss: what does not fit is said before any worker starts."""
    x, y = federation.x[:2], federation.y[:2]
    try:
        with torch.no_grad():
            task.loss(task.fresh().eval()(x.to(task.device)), y.to(task.device))
    except Exception as error:
        said = str(error).split("\n")[0].rstrip(".")
        raise ConfigError(
            f"the model does not fit the data: inputs of shape {federation.shape} and targets of {federation.name} "
            f"gave {type(error).__name__} ({said})."
        ) from error
