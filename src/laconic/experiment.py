"""From parts to a run: the one place where data, model, method and codecs meet."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

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
    Precision,
    Task,
    Tree,
    accuracy,
    checked_value,
    did_you_mean,
    num_bytes,
    perplexity,
    predictions,
    token_loss,
    tree_sha256,
)
from laconic.data import Federation, digits, with_validation
from laconic.engine import (
    Bounds,
    Clients,
    DownMemory,
    Limit,
    Link,
    Observer,
    Record,
    Run,
    RunDirectory,
    Schedule,
    Simulation,
    Stop,
    execute,
)
from laconic.evaluations import EVALUATIONS, Global, evaluation_of
from laconic.methods import fedavg, methods
from laconic.models import initialize, load_state, models, named_scheme, user_model

Model = nn.Module | Callable[..., nn.Module] | str
"""A name of the catalogue, a module, something that makes one, or "module.path:Name"."""
Layout = Literal["auto", "contiguous", "channels_last"]
"""How images lie in memory."""
CodecText = str | Sequence[str]
"""A codec as a configuration writes it."""


MOVED = {
    "new_test": 'add "ensemble" to run.evaluations',
    "local_eval": 'leave "local" out of run.evaluations',
    "probe": 'add { name = "probe", layer = … } to run.evaluations',
    "channels_last": "set layout to 'channels_last' or 'contiguous'",
    "newcomer": "give a section [newcomer], or data.joined_later(after=…) in Python",
}
"""Where settings of 0.1 stand now."""


@dataclass(frozen=True, kw_only=True)
class RunSettings(Schedule):
    """What `[run]` may set, and `fit` and `compare` may be given: the `Schedule`, and what else a run needs to know.

    `evaluations` are what a run measures: names ("global", "local", "ensemble", "finetuned"), tables with settings
    (`{ name = "probe", layer = "fc1" }`), or objects of one's own. `validation` is the share of every client's training
    examples that is held out, to decide by. `store` says where clients' own states lie: in memory, or on disk where
    they are too large for it. `stop` ends a run before its last round (`{ target = 0.9 }`, say; see `engine.Stop`).

    `max_norm` and `max_weight` are what one reply may count at most, in any method (`engine.bounds`): its norm, and the
    examples that it claims. `"auto"` is three times the median of the cohort's replies, `"off"` is any.

    `precision = "bfloat16"` computes local updates and evaluations under autocast; weights, optimizers and messages
    stay float32. `layout` is how images lie in memory: with `"channels_last"` convolutions are quicker on a CPU, and
    results differ in the last digits; `"auto"` takes it for models with convolutions, and what it took is recorded.
    """

    name: str = "run"
    seed: int = 0
    evaluations: tuple[Any, ...] = ("global", "local")
    validation: float | None = None
    workers: int | Literal["auto"] = "auto"
    store: Literal["memory", "disk"] = "memory"
    max_norm: Limit = "auto"
    max_weight: Limit = "auto"
    device: str = "cpu"
    precision: Precision = "float32"
    layout: Layout = "auto"
    checkpoint_every: int = 10
    stop: Stop | None = None

    def __post_init__(self) -> None:
        Schedule.__post_init__(self)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ConfigError(f"run.seed must be a whole number and not negative, got {self.seed!r}.")
        if self.checkpoint_every < 1:
            raise ConfigError(f"run.checkpoint_every must be at least 1, got {self.checkpoint_every}.")
        if isinstance(self.evaluations, str):
            raise ConfigError(f"run.evaluations must be a list, got {self.evaluations!r}.")
        for named in self.evaluations:
            evaluation_of(named)
        _ = self.bounds

    @property
    def bounds(self) -> Bounds:
        """What one reply may count at most."""
        return Bounds(**{field.name: getattr(self, field.name) for field in fields(Bounds)})

    def plain(self) -> dict[str, Any]:
        """The settings as a configuration holds them."""
        named = [one if isinstance(one, str | Mapping) else repr(one) for one in self.evaluations]
        made = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**made, "evaluations": named, "stop": None if self.stop is None else asdict(self.stop)}


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
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        mend = (
            f"make one: {_name(loss)}()" if isinstance(loss, type) else "give a function (output, target) → mean loss"
        )
        raise ConfigError(f"loss must be a function of outputs and targets, got {_described(loss)}; {mend}.")
    if metrics is not None and not isinstance(metrics, Mapping):
        raise ConfigError(
            f"metrics must be a mapping of names to functions, got {_described(metrics)}; "
            'write {"accuracy": lc.accuracy}, say.'
        )
    classification = federation.kind == "classification"
    tokens = classification and federation.y.dim() > 1
    usual: dict[str, Metric] = {"accuracy": accuracy} if classification else {}
    if tokens:
        usual["perplexity"] = perplexity
    task = Task(
        build,
        loss=loss or (token_loss if tokens else F.cross_entropy if classification else F.mse_loss),
        initialize=first_weights,
        initial=initial,
        device=_checked_device(device),
        outputs="logits" if classification else "values",
        architecture=architecture,
        metrics=metrics if metrics is not None else usual,
    )
    _try_out(task, federation)
    return task


def _layout(run: RunSettings, task: Task, data: Federation) -> Layout:
    """How images lie in memory: what is asked for, or what the model's convolutions are quickest with."""
    if run.layout != "auto":
        return run.layout
    convolves = any(isinstance(layer, nn.Conv2d) for layer in task.module.modules())
    return "channels_last" if convolves and data.x.ndim == 4 and run.device == "cpu" else "contiguous"


def _checked_precision(run: RunSettings) -> Precision:
    """The precision, if the device has it; one warning where it has no arithmetic for it."""
    if run.precision == "float32":
        return run.precision
    try:
        with torch.autocast(torch.device(run.device).type, dtype=torch.bfloat16):
            float(torch.nn.functional.linear(torch.ones(1, 2, device=run.device), torch.ones(1, 2, device=run.device)))
    except Exception as error:
        said = str(error).split("\n")[0].rstrip(".")
        raise ConfigError(f"run.precision 'bfloat16' cannot be used on {run.device!r}: {said}.") from None
    if torch.device(run.device).type == "cpu" and not bfloat16_arithmetic():
        warnings.warn(
            "this processor has no bfloat16 arithmetic: precision = 'bfloat16' is slower here than 'float32'.",
            RuntimeWarning,
            stacklevel=2,
        )
    return run.precision


def bfloat16_arithmetic() -> bool:
    """Whether this processor multiplies bfloat16 numbers by itself (AVX-512 BF16 or AMX)."""
    found = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(bool(asked()) for asked in found if asked is not None)


def _codec(codec: CodecText | Codec) -> Codec:
    if isinstance(codec, str | Sequence):
        return codecs.parse(codec)
    if not all(hasattr(codec, name) for name in ("encode", "decode", "init_state")):
        raise ConfigError(f'a codec is a text such as "eden:bits=1" or a Codec, got {_described(codec)}.')
    return codec


def experiment(
    *,
    data: Federation,
    model: Model = "mlp",
    method: Method | str = "fedavg",
    up: CodecText | Codec | None = None,
    down: CodecText | Codec | None = None,
    down_memory: DownMemory = "auto",
    memory: int | str = "1 GiB",
    loss: Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
    init: Mapping[str, Tensor] | Path | str | None = None,
    model_settings: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
    deployment: Deployment = Deployment(),
    hashed: bool = True,
    run: RunSettings = RunSettings(),
) -> Experiment:
    """A run from objects, ready to start: the one place where parts become a simulation.

    A codec that is not given is the one that the method is made for. `config` and `facts` are what its files say of it,
    if somebody knows better than the objects do. `hashed` for a run that leaves files, which tell whether it is the
    same.
    """
    data, chosen = _checked_data(data), checked_method(method)
    if run.validation is not None:
        data = with_validation(data, fraction=run.validation, seed=run.seed)
    task = make_task(data, model, model_settings, loss=loss, metrics=metrics, init=init, device=run.device)
    task, run = replace(task, precision=_checked_precision(run)), replace(run, layout=_layout(run, task, data))
    data = data.channels_last() if run.layout == "channels_last" else data
    usual_up, usual_down = chosen.link
    measured = [evaluation_of(named) for named in run.evaluations]
    simulation = Simulation(
        chosen,
        task,
        data,
        Link(
            _codec(usual_up if up is None else up),
            _codec(usual_down if down is None else down),
            down_memory=down_memory,
            memory=num_bytes(memory, what="link.memory"),
        ),
        run,
        seed=run.seed,
        evaluations=measured,
        workers=run.workers,
        store=run.store,
        bounds=run.bounds,
        stop=run.stop,
    )
    if simulation.method.phases is not None and not any(isinstance(one, Global) for one in measured):
        raise ConfigError(f"{chosen.name}: its goal is the server's accuracy; add 'global' to run.evaluations.")
    named = model if isinstance(model, str) else _name(model)
    if config is None:
        made: dict[str, dict[str, Any]] = {
            "run": run.plain(),
            "data": {"source": repr(data)},
            "model": {"name": named},
            "method": {"name": chosen.name, **chosen.settings},
            "link": {
                "up": simulation.agreement.link.up.text,
                "down": simulation.agreement.link.down.text,
                "down_memory": down_memory,
                "memory": memory,
            },
        }
        if hashed:
            # Objects have no settings that could be compared when the run is resumed, so their contents are.
            made["data"]["sha256"] = _data_sha256(data)
            made["model"]["first_state_sha256"] = tree_sha256(simulation.state.server)
            made["model"]["loss"] = _name(task.loss)
        config = made
    config = {**config, "run": {**config["run"], "layout": run.layout}}
    facts = facts or {"model": named, "data": data.name}
    return Experiment(simulation, run.name, config, facts, run.checkpoint_every, deployment)


def fit(
    *,
    data: Federation,
    model: Model = "mlp",
    method: Method | str = "fedavg",
    up: CodecText | Codec | None = None,
    down: CodecText | Codec | None = None,
    down_memory: DownMemory = "auto",
    memory: int | str = "1 GiB",
    loss: Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
    init: Mapping[str, Tensor] | Path | str | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    observer: Observer | None = None,
    **run: Any,
) -> Run:
    """Train a model across the clients of a federation, with every byte counted.

    All of `RunSettings` may be given too: `rounds`, `cohort`, `seed`, `eval_every`, `evaluations`, `workers` and so on.
    With `out`, the run leaves its files in `out/name` and can be resumed. `up` and `down` are float32 unless given, or
    what the method is made for (`mask` for `fedpm`). Where `down` sends changes, the server remembers what clients
    hold: one tree for all of them or one for each (`down_memory`), in no more than `memory` bytes.

    >>> import laconic as lc
    >>> run = lc.fit(method=lc.fedprox(mu=0.01), data=lc.data.digits(clients=10), rounds=2, cohort=5, workers=0)
    >>> len(run.history), run.summary["bits_per_parameter_up"] > 32
    (2, True)
    """
    if out is not None and not isinstance(out, str | Path):
        raise ConfigError(f'out must be a folder, got {_described(out)}; out = "runs", say.')
    if observer is not None and not all(hasattr(observer, name) for name in ("started", "advanced", "finished")):
        raise ConfigError(
            f"observer must have started, advanced and finished, got {_described(observer)}; "
            "laconic.engine.Observer says what they are told."
        )
    return experiment(
        data=data,
        model=model,
        method=method,
        up=up,
        down=down,
        down_memory=down_memory,
        memory=memory,
        loss=loss,
        metrics=metrics,
        init=init,
        hashed=out is not None,
        run=run_settings(run, where="fit"),
    ).run(out=Path(out) if out is not None else None, resume=resume, overwrite=overwrite, observer=observer)


def run_settings(given: Mapping[str, Any], *, where: str) -> RunSettings:
    """The settings of a run from keyword arguments; a word that is none of them gets a hint."""
    known = [field.name for field in fields(RunSettings)]
    for name in given:
        if name in MOVED:
            raise ConfigError(f"{where}: {name} is no more; {MOVED[name]}.")
        if name not in known:
            parameters = [name for name, p in inspect.signature(fit).parameters.items() if p.kind is p.KEYWORD_ONLY]
            raise ConfigError(f"{where}: unknown argument {name!r}; {did_you_mean(name, [*known, *parameters])}")
    hints, made = get_type_hints(RunSettings), dict(given)
    for name, value in given.items():
        if name != "evaluations" and not isinstance(value, Stop):
            checked = checked_value(hints[name], value, where=f"{where}: {name}")
            made[name] = checked if isinstance(checked, Stop) else value
    return RunSettings(**made)


def _checked_data(data: object) -> Federation:
    if not isinstance(data, Federation):
        raise ConfigError(
            f"data must be a Federation, got {_described(data)}; "
            "make one with lc.data.digits(clients=…) or lc.Federation.from_arrays((x, y), clients=…)."
        )
    return data


def checked_method(method: object) -> Method:
    """A method that was given as such, or by its name."""
    if isinstance(method, str):
        return methods.build(method, {})
    if not isinstance(method, Method):
        called = f"; call it: {_name(method)}()" if callable(method) else ""
        raise ConfigError(f"method must be a Method or a name, got {_described(method)}{called}.")
    return method


def _described(thing: object) -> str:
    kind = type(thing).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}" + (f" ({_name(thing)})" if callable(thing) else "")


def simulate(
    method: Method,
    clients: Clients,
    *,
    task: Task,
    up: Codec,
    down: Codec,
    rounds: int,
    cohort: int,
    seed: int = 0,
    workers: int | Literal["auto"] = 0,
) -> Iterator[Record]:
    """The plain loop: one record per round."""
    schedule = Schedule(rounds=rounds, cohort=cohort)
    yield from Simulation(
        method,
        task,
        clients,
        Link(up, down),
        schedule,
        seed=seed,
        workers=workers,
        evaluations=EVALUATIONS,
        bounds=Bounds(),
    )


def example_update() -> Tree:
    """A real update: what a client of the digits sends after five epochs, with an MLP of 512 neurons."""
    federation = digits(clients=10)
    task = make_task(federation, "mlp", {"hidden": [512]})
    method, key = fedavg().bind(task), Key.from_seed(0)
    received = method.broadcast(method.init(key), ClientInfo(0, 1, 0), key)
    return method.client_update(received, {}, federation.client(0), ClientInfo(0, 1, 0), key).message


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
    """Some examples through model, loss and metrics: what does not fit is said before any worker starts."""
    x, y = federation.x[:3].to(task.device), federation.y[:3].to(task.device)
    what = "loss"
    try:
        with torch.no_grad():
            output = task.fresh().eval()(x)
            if isinstance(output, Tensor):
                _check_outputs(task, federation, output)
            loss = task.loss(output, y)
            values, (rows, labels) = {}, predictions(output, y)
            for what, metric in task.metrics.items():
                values[what] = metric(rows, labels)
    except ConfigError:
        raise
    except Exception as error:
        said = str(error).split("\n")[0].rstrip(".")
        where = "" if what == "loss" else f" in the metric {what!r}"
        raise ConfigError(
            f"the model does not fit the data: inputs of shape {federation.shape} and targets of {federation.name} "
            f"gave {type(error).__name__}{where} ({said})."
        ) from error
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ConfigError(f"the loss must give one number, the mean over a batch, got {_shape(loss)} for a batch of 3.")
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.shape[:1] != (len(labels),):
            each = "example" if y.dim() < 2 else "token"
            raise ConfigError(
                f"the metric {name!r} must give one value per {each}, got {_shape(value)} for a batch of {len(labels)};"
                " leave the mean to the evaluation."
            )


def _check_outputs(task: Task, federation: Federation, output: Tensor) -> None:
    """What torch would compute with, or say in a riddle: too few classes, or outputs that are spread over targets."""
    if task.loss is F.cross_entropy and output.dim() == 2 and output.shape[1] < federation.classes:
        raise ConfigError(
            f"the model gives {output.shape[1]} outputs, but {federation.name} has {federation.classes} classes, "
            f"0 to {federation.classes - 1}."
        )
    if task.loss is F.cross_entropy and not federation.classes and federation.y.shape[1:] != output.shape[1:]:
        raise ConfigError("cross_entropy wants whole numbers as targets, but y holds floats: give y.astype(int).")
    if task.loss is F.mse_loss and output.shape[1:] != federation.y.shape[1:]:
        raise ConfigError(
            f"the model gives outputs of shape {tuple(output.shape[1:])}, but targets have "
            f"{tuple(federation.y.shape[1:])}: y holds floats, which makes this regression. "
            "For class labels give whole numbers: y.astype(int)."
        )


def _shape(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
