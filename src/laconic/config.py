"""A run as a TOML file.

Every section is checked against the function that it is for, so that a file accepts what Python accepts::

    [run]     name, seed, rounds, cohort, eval_every, …      laconic.experiment.RunSettings
    [data]    source = "digits" and its settings             laconic.data.sources, or "module.path:function"
    [model]   name = "mlp" and its settings, init, loss …    laconic.models.models, or "module.path:Name"
    [method]  name = "fedavg" and its settings               laconic.methods.methods, or "module.path:function"
    [link]    up, down, down_memory, memory                  laconic.codecs.parse; else what the method is made for

    [newcomer]  enabled, rounds, fraction, train, test …     a client that joins later, with rotated images
    [sweep]     section.key = [values to try]                many runs in one file, for laconic compare
    [deploy]    deadline                                     what only a run on real machines needs
"""

from __future__ import annotations

import copy
import itertools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

from laconic.codecs import parse
from laconic.core import (
    ConfigError,
    LaconicError,
    Method,
    checked_settings,
    did_you_mean,
    find_object,
    num_bytes,
    one_of,
    resolved_settings,
)
from laconic.data import Federation, sources, with_rotated_client, with_validation
from laconic.engine import Agreement, Clients, DownMemory
from laconic.experiment import MOVED, Deployment, Experiment, RunSettings, experiment
from laconic.methods import methods
from laconic.models import models

_SECTIONS = ("run", "data", "model", "method", "link", "newcomer", "deploy")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "data": {"source": "digits"},
    "model": {"name": "mlp"},
    "method": {"name": "fedavg"},
}


def _link(
    *,
    up: str | list[str] | None = None,
    down: str | list[str] | None = None,
    down_memory: DownMemory = "auto",
    memory: str | int = "1 GiB",
) -> dict[str, Any]:
    codecs = {way: None if text is None else parse(text).text for way, text in (("up", up), ("down", down))}
    one_of("link.down_memory", down_memory, get_args(DownMemory))
    num_bytes(memory, what="link.memory")
    return {**codecs, "down_memory": down_memory, "memory": memory}


@dataclass(frozen=True, kw_only=True)
class _Newcomer:
    """A client that joins when `run.rounds` are over, for so many `rounds` more, each with a `fraction` of the others.

    It has rotated copies of images of all clients; with `degrees = 0` it is the data's own last client.
    """

    enabled: bool = False
    rounds: int = 500
    fraction: float = 0.1
    train: int = 3000
    test: int = 500
    degrees: int = 90

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"newcomer.rounds must be at least 1, got {self.rounds}.")
        if not 0 <= self.fraction <= 1:
            raise ConfigError(f"newcomer.fraction must lie in [0, 1], got {self.fraction}.")
        if self.degrees not in (0, 90, 180, 270):
            raise ConfigError(f"newcomer.degrees must be 0, 90, 180 or 270, got {self.degrees}.")

    def joined(self, federation: Federation, run: RunSettings) -> tuple[Federation, RunSettings]:
        """The population with the newcomer, and the run that goes on until it is over."""
        clients = federation.num_clients - (self.degrees == 0)
        if run.validation is not None:  # held out first, so that no image of it is rotated
            federation = with_validation(federation, fraction=run.validation, seed=run.seed)
            run = replace(run, validation=None)
        if self.degrees:
            federation = with_rotated_client(
                federation, train=self.train, test=self.test, degrees=self.degrees, seed=run.seed
            )
        federation = federation.joined_later(after=run.rounds, others=int(self.fraction * clients))
        return federation, replace(run, rounds=run.rounds + self.rounds)


def _model_extras(
    *, init: str | None = None, loss: str | None = None, metrics: dict[str, str] | None = None
) -> dict[str, Any]:
    return {
        "init": init,
        "loss": find_object(loss, what="model.loss") if loss else None,
        "metrics": {n: find_object(text, what=f"model.metrics.{n}") for n, text in metrics.items()}
        if metrics
        else None,
    }


Table = dict[str, dict[str, Any]]
"""A run as plain sections, as a TOML file has them."""


def read_table(path: Path, overrides: Iterable[str] = ()) -> Table:
    """A TOML file as plain sections, with `section.key=value` overrides applied."""
    table = overridden(_read(path), overrides)
    if "sweep" in table:
        raise ConfigError(f"{path}: a [sweep] is many runs; run them with laconic compare {path}.")
    return sections(table, where=str(path))


def read_tables(path: Path, overrides: Iterable[str] = ()) -> list[tuple[str, Table]]:
    """The runs of a TOML file with their names: one, or with a [sweep] one for every combination of its values.

    The overrides hold for all of them.
    """
    table = overridden(_read(path), overrides)
    sweep = table.pop("sweep", {})
    if not isinstance(sweep, dict):
        raise ConfigError(f"{path}: sweep must be a section of lists, got {sweep!r}.")
    axes = _axes(sweep, where=f"{path}: [sweep]")
    run = table.get("run")
    name = run.get("name", path.stem) if isinstance(run, dict) else path.stem
    made = []
    for values in itertools.product(*axes.values()):
        chosen = copy.deepcopy(table)
        words = []
        for keys, value in zip(axes, values, strict=True):
            _set(chosen, keys, copy.deepcopy(value), where=f"{path}: [sweep] {'.'.join(keys)}")
            words.append(_words(keys, value))
        made.append((", ".join(words) or str(name), sections(chosen, where=str(path))))
    return made


def sections(table: Mapping[str, Any], *, where: str) -> Table:
    """All the sections of a run, from those that are given and the defaults."""
    for section, value in table.items():
        if section == "new_device":
            raise ConfigError(
                f"{where}: the section [new_device] is [newcomer] now, where turns = 1 is degrees = 90; "
                "warmup_epochs is a setting of [method]."
            )
        if section not in _SECTIONS:
            raise ConfigError(f"{where}: unknown section [{section}]; {did_you_mean(section, _SECTIONS)}")
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: {section} must be a section of settings, got {value!r}.")
        for key in value.keys() & MOVED.keys() if section == "run" else ():
            raise ConfigError(f"{where}: run.{key} is no more; {MOVED[key]}.")
    return {section: {**_DEFAULTS.get(section, {}), **table.get(section, {})} for section in _SECTIONS}


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {(error.strerror or str(error)).lower()}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None


def _axes(sweep: Mapping[str, Any], *, where: str, above: tuple[str, ...] = ()) -> dict[tuple[str, ...], list[Any]]:
    """The keys that a sweep sets, each with its values: `link.up = […]` and `"link.up" = […]` are the same."""
    axes: dict[tuple[str, ...], list[Any]] = {}
    for key, value in sweep.items():
        keys = (*above, *key.split("."))
        path = ".".join(keys)
        if isinstance(value, dict):
            axes |= _axes(value, where=where, above=keys)
        elif not isinstance(value, list) or not value:
            raise ConfigError(f"{where} {path} must be a list of values to try, got {value!r}.")
        elif keys in (("run", "seed"), ("run", "name")):
            raise ConfigError(f"{where} {path}: seeds are given by --seeds, and names are made from what is swept.")
        else:
            axes[keys] = value
    return axes


def _words(keys: tuple[str, ...], value: Any) -> str:
    """What a value of a sweep is called: a method by its name, all else by its key."""
    if isinstance(value, dict):
        name = value.get("name", value.get("source", keys[-1]))
        rest = ",".join(f"{key}={inner}" for key, inner in value.items() if key not in ("name", "source"))
        return f"{name}:{rest}" if rest else str(name)
    return str(value) if keys[-1] in ("name", "source") else f"{keys[-1]}={value}"


class Place(NamedTuple):
    """Where a client stands: its number, and how many clients there are."""

    client: int
    of: int


def experiment_from(table: Mapping[str, Mapping[str, Any]], *, place: Place | None = None) -> Experiment:
    """An experiment from sections, as `read_table` gives them; whatever is wrong raises before anything is made.

    On a client's own machine `place` says which client it is: a source of a single client's data is then this one's.
    """
    run = RunSettings(**checked_settings(RunSettings, table["run"], where="[run]"))
    link = _link(**checked_settings(_link, table["link"], where="[link]"))
    method_settings = dict(table["method"])
    method_name = _word(method_settings, "name", "[method]")
    method = methods.build(method_name, method_settings)
    if not isinstance(method, Method):
        raise ConfigError(f"method {method_name!r} must give a laconic Method, got {type(method).__name__}.")
    model_settings = dict(table["model"])
    model_name = _word(model_settings, "name", "[model]")
    extra_settings: dict[str, Any] = {
        key: model_settings.pop(key) for key in ("init", "loss", "metrics") if key in model_settings
    }
    extras = _model_extras(**checked_settings(_model_extras, extra_settings, where="[model]"))
    if ":" not in model_name:
        checked_settings(models[model_name], model_settings, where=f"[model] {model_name}")
    data_settings = dict(table["data"])
    source = _word(data_settings, "source", "[data]")
    newcomer = _Newcomer(**checked_settings(_Newcomer, table.get("newcomer", {}), where="[newcomer]"))
    deployment = Deployment(**checked_settings(Deployment, table.get("deploy", {}), where="[deploy]"))
    federation = _federation(source, data_settings, seed=run.seed)
    if place is not None and federation.num_clients == 1:
        federation = federation.placed(place.client, of=place.of)
    if newcomer.enabled:
        federation, run = newcomer.joined(federation, run)
    made = experiment(
        data=federation,
        model=model_name,
        method=method,
        model_settings=model_settings,
        config=resolved(table),
        facts={"model": model_name, "data": source},
        deployment=deployment,
        run=run,
        **link,
        **extras,
    )
    made.simulation.anew = partial(parts_of, table)
    return made


def parts_of(table: Mapping[str, Mapping[str, Any]]) -> tuple[Agreement, Clients]:
    """What a process of its own needs to work for a run: made from the run's sections there, data and all."""
    simulation = experiment_from(table).simulation
    return simulation.agreement, simulation.clients


def resolved(table: Mapping[str, Mapping[str, Any]]) -> Table:
    """The whole configuration with all defaults, as a run's config.toml has it. No data are read for that.

    >>> resolved(sections({"method": {"name": "fedpm"}}, where="here"))["link"]
    {'up': 'mask', 'down': 'mask', 'down_memory': 'auto', 'memory': '1 GiB'}
    """
    run = resolved_settings(RunSettings, table["run"])
    data, model, method = dict(table["data"]), dict(table["model"]), dict(table["method"])
    source, architecture = _word(data, "source", "[data]"), _word(model, "name", "[model]")
    name = _word(method, "name", "[method]")
    if ":" not in source:
        data = resolved_settings(sources[source], data)
        if "seed" in data and "seed" not in table["data"]:
            data["seed"] = run["seed"]
    extras: dict[str, Any] = {key: model.pop(key) for key in ("init", "loss", "metrics") if key in model}
    if ":" not in architecture:
        model = resolved_settings(models[architecture], model)
    preferred = methods.build(name, method).link
    given = _link(**checked_settings(_link, table["link"], where="[link]"))
    config: Table = {
        "run": run,
        "data": {"source": source, **data},
        "model": {"name": architecture, **model, **extras},
        "method": {"name": name, **resolved_settings(methods[name], method)},
        "link": {
            **given,
            **{way: given[way] or parse(usual).text for way, usual in zip(("up", "down"), preferred, strict=True)},
        },
    }
    if table.get("newcomer", {}).get("enabled"):
        config["newcomer"] = resolved_settings(_Newcomer, table["newcomer"])
    if table.get("deploy"):
        config["deploy"] = resolved_settings(Deployment, table["deploy"])
    return config


def _federation(source: str, settings: dict[str, Any], *, seed: int) -> Federation:
    if ":" in source:
        try:
            made = find_object(source, what="data.source")(**settings)
        except LaconicError:
            raise
        except Exception as error:  # a user's own code: whatever it says is about this setting
            said = " ".join(str(error).split())
            raise ConfigError(f"data.source {source!r} failed with {type(error).__name__} ({said}).") from error
        if not isinstance(made, Federation):
            raise ConfigError(f"data.source {source!r} must give a laconic Federation, got {type(made).__name__}.")
        return made
    if "seed" in resolved_settings(sources[source], {}):
        settings.setdefault("seed", seed)
    return sources.build(source, settings)


def _word(settings: dict[str, Any], key: str, where: str) -> str:
    word = settings.pop(key)
    if not isinstance(word, str):
        raise ConfigError(f"{where} {key} must be a name, got {word!r}.")
    return word


def overridden(table: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """The table, changed by `section.key=value`."""
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = tuple(path.strip().split("."))
        if not equals or len(keys) < 2 or not all(keys):
            raise ConfigError(f"--set takes section.key=value, got {override!r}.")
        _set(table, keys, toml_value(text), where=f"--set {override}")
    return table


def toml_value(text: str) -> Any:
    """A TOML value; a bare word is a string.

    >>> toml_value("0.5"), toml_value("eden:bits=2")
    (0.5, 'eden:bits=2')
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def _set(table: dict[str, Any], keys: tuple[str, ...], value: Any, *, where: str) -> None:
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: {key!r} is a value, not a section.")
    table[keys[-1]] = value
