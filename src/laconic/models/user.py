"""A user's own module as the model of a run."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from laconic.core import ConfigError, Key, did_you_mean, find_object, isolated, read_state

Factory = Callable[..., nn.Module]


@dataclass(frozen=True)
class _Call:
    """Builds by calling a class or a function. An object, and not a closure, so that it can be pickled."""

    factory: Factory
    settings: Mapping[str, Any]

    def __call__(self) -> nn.Module:
        return _checked_module(self.factory(**self.settings), _name(self.factory))


@dataclass(frozen=True)
class _Copy:
    """Builds copies of a module."""

    module: nn.Module

    def __call__(self) -> nn.Module:
        return copy.deepcopy(self.module)


@dataclass(frozen=True)
class _Import:
    """Builds from "module.path:Name", imported anew in every process that unpickles this."""

    text: str
    folder: Path
    settings: Mapping[str, Any]

    def __call__(self) -> nn.Module:
        found = find_object(self.text, what="model", folder=self.folder)
        if isinstance(found, nn.Module):
            return copy.deepcopy(found)
        return _checked_module(found(**self.settings), repr(self.text))


def user_model(
    model: nn.Module | Factory | str, settings: Mapping[str, Any]
) -> tuple[Callable[[], nn.Module], Mapping[str, Tensor] | None]:
    """How to build a user's model, and its first weights where it brings them.

    `model` is a module (copied; its weights are the first weights), a class or function that makes one when
    called with `settings`, or "module.path:Name" of either; modules are also looked for in the current folder.
    Builders can be pickled wherever the user's own class or function can.

    >>> build, initial = user_model(nn.Linear(2, 1), {})
    >>> build(), sorted(initial)
    (Linear(in_features=2, out_features=1, bias=True), ['bias', 'weight'])
    >>> build, initial = user_model(nn.Linear, {"in_features": 2, "out_features": 1})
    >>> build(), initial
    (Linear(in_features=2, out_features=1, bias=True), None)
    """
    if isinstance(model, nn.Module):
        _check_no_settings(type(model).__name__, settings)
        return _with_weights(model, type(model).__name__)
    if isinstance(model, str):
        folder = Path.cwd()
        found = find_object(model, what="model", folder=folder)
        build: Callable[[], nn.Module] = _Import(model, folder, dict(settings))
        if isinstance(found, nn.Module):
            _check_no_settings(repr(model), settings)
            return build, _with_weights(found, repr(model))[1]
        _check_call(found, repr(model), settings)
    elif callable(model):
        _check_call(model, _name(model), settings)
        build = _Call(model, dict(settings))
    else:
        raise ConfigError(
            "a model is a name of the catalogue, a torch module, a function that makes one, or "
            f'"module.path:Name", got {type(model).__name__}.'
        )
    with isolated(Key.from_seed(0)):
        build()  # what is wrong with it is said now, and not by a worker later
    return build, None


def _with_weights(module: nn.Module, name: str) -> tuple[Callable[[], nn.Module], Mapping[str, Tensor]]:
    _checked_module(module, name)
    try:
        snapshot = copy.deepcopy(module)
    except Exception as error:
        raise ConfigError(f"model {name} cannot be copied ({_one_line(error)}).") from error
    return _Copy(snapshot), {leaf: tensor.clone() for leaf, tensor in read_state(snapshot).items()}


def _check_call(factory: Factory, name: str, settings: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except ValueError:
        return  # written in C: the call itself will tell
    parameters = signature.parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for key in settings:
            if key not in known:
                hint = did_you_mean(key, known) if known else "it takes no settings."
                raise ConfigError(f"model {name}: unknown key {key!r}; {hint}")
    for p in parameters:
        required = p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        if required and (p.name not in settings or p.kind is p.POSITIONAL_ONLY):
            raise ConfigError(
                f"model {name} cannot be made without its argument {p.name!r}; "
                "give it as a setting, or a function that needs none."
            )


def _check_no_settings(name: str, settings: Mapping[str, Any]) -> None:
    if settings:
        raise ConfigError(f"model {name} is made already, so it takes no setting {next(iter(settings))!r}.")


def _checked_module(made: object, name: str) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise ConfigError(f"model {name} must give a torch module, got {type(made).__name__}.")
    for leaf, parameter in made.named_parameters():
        if is_lazy(parameter):
            raise ConfigError(f"model {name}: {leaf!r} has no shape yet; pass one batch through lazy layers first.")
    return made


def _name(factory: Factory) -> str:
    return getattr(factory, "__qualname__", type(factory).__name__)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
