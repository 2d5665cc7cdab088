"""A run as a TOML file.

Every section is checked against the function that it is for, so that a file accepts what Python accepts::

    [run]     name, seed, rounds, cohort, eval_every, …      Schedule
    [data]    source = "digits" and its settings             laconic.data.sources, or "module.path:function"
    [model]   name = "mlp" and its settings, init, loss …    laconic.models.models, or "module.path:Name"
    [method]  name = "fedavg" and its settings               laconic.methods.methods
    [link]    up, down                                       laconic.codecs.parse; else what the method is made for

    [new_device]  enabled, rounds, fraction, train, test …   a device that joins later, with turned images
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from laconic.codecs import parse
from laconic.core import ConfigError, LaconicError, checked_settings, did_you_mean, find_object, resolved_settings
from laconic.data import Federation, sources, with_rotated_client, with_validation
from laconic.engine import Newcomer, Schedule
from laconic.experiment import Experiment, make_task, prepare
from laconic.methods import KeepLocal, methods
from laconic.models import models

_SECTIONS = ("run", "data", "model", "method", "link", "new_device")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "data": {"source": "digits"},
    "model": {"name": "mlp"},
    "method": {"name": "fedavg"},
}


@dataclass(frozen=True)
class _RunSettings:
    name: str
    seed: int
    checkpoint_every: int
    device: str
    validation: float | None
    schedule: Schedule


def _run(
    *,
    name: str = "run",
    seed: int = 0,
    checkpoint_every: int = 10,
    device: str = "cpu",
    validation: float | None = None,
    schedule: Schedule = Schedule(),  # noqa: B008
) -> _RunSettings:
    if seed < 0:
        raise ConfigError(f"run.seed must not be negative, got {seed}.")
    if checkpoint_every < 1:
        raise ConfigError(f"run.checkpoint_every must be at least 1, got {checkpoint_every}.")
    return _RunSettings(name, seed, checkpoint_every, device, validation, schedule)


def _link(*, up: str | list[str] | None = None, down: str | list[str] | None = None) -> dict[str, str | None]:
    return {way: None if text is None else parse(text).text for way, text in (("up", up), ("down", down))}


@dataclass(frozen=True)
class _NewDevice:
    enabled: bool
    rounds: int
    fraction: float
    train: int
    test: int
    turns: int
    warmup_epochs: int


def _new_device(
    *,
    enabled: bool = False,
    rounds: int = 500,
    fraction: float = 0.1,
    train: int = 3000,
    test: int = 500,
    turns: int = 1,
    warmup_epochs: int = 5,
) -> _NewDevice:
    if rounds < 1:
        raise ConfigError(f"new_device.rounds must be at least 1, got {rounds}.")
    if not 0 <= fraction <= 1:
        raise ConfigError(f"new_device.fraction must lie in [0, 1], got {fraction}.")
    if not 1 <= turns <= 3:
        raise ConfigError(f"new_device.turns must be 1, 2 or 3 quarter turns, got {turns}.")
    if warmup_epochs < 0:
        raise ConfigError(f"new_device.warmup_epochs must not be negative, got {warmup_epochs}.")
    return _NewDevice(enabled, rounds, fraction, train, test, turns, warmup_epochs)


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


def read_table(path: Path, overrides: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """A TOML file as plain sections, with `section.key=value` overrides applied."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {(error.strerror or str(error)).lower()}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None
    for override in overrides:
        _apply(table, override)
    for section, value in table.items():
        if section not in _SECTIONS:
            raise ConfigError(f"{path}: unknown section [{section}]; {did_you_mean(section, _SECTIONS)}")
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: {section} must be a section of settings, got {value!r}.")
    return {section: {**_DEFAULTS.get(section, {}), **table.get(section, {})} for section in _SECTIONS}


def experiment_from(table: Mapping[str, Mapping[str, Any]]) -> Experiment:
    """An experiment from sections, as `read_table` gives them; whatever is wrong raises before anything is made."""
    run = _run(**checked_settings(_run, table["run"], where="[run]"))
    link = _link(**checked_settings(_link, table["link"], where="[link]"))
    method_settings = dict(table["method"])
    method_name = _word(method_settings, "name", "[method]")
    method = methods.build(method_name, method_settings)
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
    federation = _federation(source, data_settings, seed=run.seed)
    if run.validation is not None:
        federation = with_validation(federation, fraction=run.validation, seed=run.seed)
    schedule = run.schedule
    device = _new_device(**checked_settings(_new_device, table.get("new_device", {}), where="[new_device]"))
    if device.enabled:
        if schedule.newcomer is not None:
            raise ConfigError("run.newcomer and [new_device] say the same: give one of them.")
        after, others = schedule.rounds, int(device.fraction * federation.num_clients)
        federation = with_rotated_client(
            federation, train=device.train, test=device.test, turns=device.turns, seed=run.seed
        )
        schedule = replace(schedule, rounds=after + device.rounds, newcomer=Newcomer(after, others))
        if isinstance(method, KeepLocal):
            method = replace(method, warmup_epochs=device.warmup_epochs, warmup_after=after)
    task = make_task(federation, model_name, model_settings, device=run.device, **extras)
    simulation = prepare(method=method, task=task, federation=federation, schedule=schedule, seed=run.seed, **link)
    agreed = simulation.agreement.link
    config: dict[str, dict[str, Any]] = {
        "run": resolved_settings(_run, table["run"]),
        "data": {
            "source": source,
            **(resolved_settings(sources[source], data_settings) if ":" not in source else data_settings),
        },
        "model": {
            "name": model_name,
            **(resolved_settings(models[model_name], model_settings) if ":" not in model_name else model_settings),
            **extra_settings,
        },
        "method": {"name": method_name, **resolved_settings(methods[method_name], method_settings)},
        "link": {"up": agreed.up.text, "down": agreed.down.text},
    }
    if device.enabled:
        config["new_device"] = resolved_settings(_new_device, table["new_device"])
    facts = {"model": model_name, "data": source}
    return Experiment(simulation, run.name, config, facts, run.checkpoint_every)


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


def _apply(table: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or len(keys) < 2 or not all(keys):
        raise ConfigError(f"--set takes section.key=value, got {override!r}.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override}: {key!r} is a value, not a section.")
    table[keys[-1]] = value
