"""Catalogues: named functions whose keyword-only parameters are the settings that a configuration may give.

A catalogue is the one place where methods, models, datasets, partitions and codecs are looked up by name, so that
what Python accepts and what a TOML file accepts are the same thing, checked by the same code::

    fedprox(*, mu: float = 0.01, solver: Solver = Solver())   <->   [method] name = "fedprox"  mu = 0.1  lr = 0.05

A parameter whose type is a dataclass marked with `flat` lends its fields to the section: `lr` above is `Solver.lr`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from laconic.core.errors import ConfigError, did_you_mean
from laconic.core.objects import find_object

T = TypeVar("T")


def flat(cls: type[T]) -> type[T]:
    """Mark a dataclass of settings whose fields stand directly in the section of whoever takes it."""
    cls.__laconic_flat__ = True  # type: ignore[attr-defined]
    return cls


class Registry(Mapping[str, Callable[..., T]], Generic[T]):
    """Functions by name, with validated settings and helpful errors. A name with a colon is a user's own function.

    >>> def square(side: int, *, colour: str = "red") -> str:
    ...     "A square."
    ...     return f"{colour} {side}"
    >>> shapes = Registry("shape", [square])
    >>> shapes.build("square", {"colour": "blue"}, given=(3,))
    'blue 3'
    """

    def __init__(
        self, kind: str, functions: list[Callable[..., T]] | Mapping[str, Callable[..., T]], *, section: str = ""
    ) -> None:
        self.kind = kind
        self.section = section or kind
        named = functions if isinstance(functions, Mapping) else {f.__name__.rstrip("_"): f for f in functions}
        self._functions = dict(named)

    def __getitem__(self, name: str) -> Callable[..., T]:
        if ":" in name:  # a user's own, "module.path:function"
            return find_object(name, what=self.kind)
        try:
            return self._functions[name]
        except KeyError:
            raise ConfigError(f"unknown {self.kind} {name!r}; {did_you_mean(name, self)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)

    def __contains__(self, name: object) -> bool:
        return name in self._functions

    def build(self, name: str, settings: Mapping[str, Any], *, given: tuple[Any, ...] = ()) -> T:
        """Call the named function with checked settings; `given` are its positional arguments."""
        function = self[name]
        return function(*given, **checked_settings(function, settings, where=f"[{self.section}] {name}"))

    def lines(self) -> list[tuple[str, str, str]]:
        """Name, first line of the docstring and where it lives, for `laconic list`."""
        return [
            (name, (inspect.getdoc(f) or "").split("\n")[0], f"{f.__module__}:{f.__qualname__}")
            for name, f in self._functions.items()
        ]


def checked_settings(
    function: Callable[..., object], settings: Mapping[str, Any], *, where: str, partly: bool = False
) -> dict[str, Any]:
    """Keyword arguments for `function` from plain values (as TOML or JSON gives them), or `ConfigError`.

    `partly`: others will be given, so that none is missing.
    """
    hints = get_type_hints(inspect.unwrap(function))
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    groups = {p.name: hints[p.name] for p in parameters if getattr(hints[p.name], "__laconic_flat__", False)}
    direct = {p.name: hints[p.name] for p in parameters if p.name not in groups}
    lent = {
        field: (name, hint)
        for name, cls in groups.items()
        for field, hint in get_type_hints(cls).items()
        if field in {f.name for f in dataclasses.fields(cls)}
    }
    defaults = {p.name: p.default for p in parameters}
    arguments: dict[str, Any] = {}
    for key, value in settings.items():
        if key in direct:
            arguments[key] = checked_value(direct[key], value, where=f"{where}: {key}")
        elif key in lent:
            name, hint = lent[key]
            base = arguments.get(name, defaults[name])
            new = {key: checked_value(hint, value, where=f"{where}: {key}")}
            arguments[name] = {**base, **new} if isinstance(base, dict) else new
        else:
            raise ConfigError(f"{where}: unknown key {key!r}; {did_you_mean(key, [*direct, *lent])}")
    for name in groups:
        if isinstance(arguments.get(name), dict):
            arguments[name] = dataclasses.replace(defaults[name], **arguments[name])
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in arguments]
    if missing and not partly:
        raise ConfigError(f"{where}: the key {missing[0]!r} is required.")
    return arguments


def gathered(function: Callable[..., object], given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for `function` from Python's own values: fields of a `flat` parameter may be given directly.

    >>> @flat
    ... @dataclasses.dataclass(frozen=True)
    ... class Pen: colour: str = "red"; width: int = 1
    >>> def line(*, length: int = 5, pen: Pen = Pen()) -> None: ...
    >>> gathered(line, {"length": 3, "width": 2})
    {'length': 3, 'pen': Pen(colour='red', width=2)}
    """
    parameters = inspect.signature(function).parameters
    name = getattr(function, "__name__", "")
    hints = get_type_hints(inspect.unwrap(function))
    for key, value in given.items():
        if key in hints and key in parameters:
            _check_plain(hints[key], value, where=f"{name}: {key}")
    if given.keys() <= parameters.keys():
        return dict(given)
    direct = {key: value for key, value in given.items() if key in parameters}
    lent = checked_settings(function, {k: v for k, v in given.items() if k not in parameters}, where=name, partly=True)
    for group, made in lent.items():
        if group in direct:
            raise ConfigError(f"{name}: give {group}, or its fields directly, not both.")
        direct[group] = made
    return direct


def _check_plain(hint: Any, value: Any, *, where: str) -> None:
    """Refuse a text where a number belongs, say. All else is left to whoever takes it, who knows better what to say."""
    if isinstance(value, Mapping) and getattr(hint, "__laconic_flat__", False):
        raise ConfigError(f"{where}: give a {hint.__name__}, or its fields directly, got {dict(value)}.")
    kinds = set(get_args(hint)) or {hint}
    infinite = isinstance(value, float) and not math.isfinite(value)
    if kinds <= {int, float, bool, str, type(None)} and isinstance(value, str | int | float | None) and not infinite:
        checked_value(hint, value, where=where)


def plain_settings(function: Callable[..., object], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a call of `function` as plain JSON values, defaults included.

    >>> def square(side: int, *, colour: str = "red", size: tuple[int, int] = (1, 2)) -> None: ...
    >>> plain_settings(square, {"colour": "blue"})
    {'colour': 'blue', 'size': [1, 2]}
    """
    settings: dict[str, Any] = {}
    hints = get_type_hints(inspect.unwrap(function))
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY:
            value = plain(arguments.get(p.name, p.default), hints[p.name])
            settings.update(value if getattr(hints[p.name], "__laconic_flat__", False) else {p.name: value})
    return settings


def resolved_settings(function: Callable[..., object], settings: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of `function` as plain values, the given ones over the defaults: what a run records.

    >>> def square(side: int, *, colour: str = "red", thick: bool = False) -> None: ...
    >>> resolved_settings(square, {"thick": True})
    {'colour': 'red', 'thick': True}
    """
    resolved: dict[str, Any] = {}
    hints = get_type_hints(inspect.unwrap(function))
    given = dict(settings)
    for p in inspect.signature(function).parameters.values():
        if p.kind is not p.KEYWORD_ONLY:
            continue
        if p.name in given and isinstance(given[p.name], Mapping):
            # A table for a dataclass: the fields that it leaves out are settings too.
            made = checked_value(hints[p.name], given[p.name], where=p.name)
            given[p.name] = plain(made) if dataclasses.is_dataclass(made) else given[p.name]
        if p.default is p.empty:
            continue
        if getattr(hints[p.name], "__laconic_flat__", False):
            resolved.update(plain(p.default))
        else:
            resolved[p.name] = plain(p.default)
    return {**resolved, **given}


def plain(value: Any, hint: Any = None) -> Any:
    """A value as JSON has it; a whole number is a float where the hint wants one, as it is in a configuration."""
    if dataclasses.is_dataclass(type(value)):
        hints = get_type_hints(type(value))
        return {field.name: plain(getattr(value, field.name), hints[field.name]) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    wanted = {hint, *get_args(hint)}
    return float(value) if isinstance(value, int) and float in wanted and not wanted & {int, bool} else value


def _check_table(hint: Any, value: Any, *, where: str) -> None:
    """Refuse keys that no dataclass of the hint has; pydantic would pass over them in silence."""
    if not isinstance(value, Mapping):
        return
    for cls in (hint, *get_args(hint)):
        if isinstance(cls, type) and dataclasses.is_dataclass(cls):
            hints = get_type_hints(cls)
            known = [field.name for field in dataclasses.fields(cls)]
            for key, inner in value.items():
                if key not in known:
                    raise ConfigError(f"{where}: unknown key {key!r}; {did_you_mean(str(key), known)}")
                _check_table(hints[key], inner, where=f"{where}.{key}")
            return


def checked_value(hint: Any, value: Any, *, where: str) -> Any:
    """A plain value as a type hint wants it, or `ConfigError`."""
    _check_table(hint, value, where=where)
    try:
        text = json.dumps(value)
    except TypeError:  # TOML has dates and times, which no setting takes
        raise ConfigError(f"{where}: a {type(value).__name__} is no setting, got {value}.") from None
    try:
        return TypeAdapter(hint).validate_json(text, strict=True)
    except ValidationError as error:
        errors = error.errors()
        if len(errors) > 1 and all(len(one["loc"]) == 1 for one in errors):  # nothing of a union fits
            wanted = " or ".join(dict.fromkeys(one["msg"].removeprefix("Input should be ") for one in errors))
            raise ConfigError(f"{where}: should be {wanted}, got {value!r}.") from None
        first = errors[0]
        inner = "".join(f".{part}" for part in first["loc"] if isinstance(part, str))
        message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        raise ConfigError(f"{where}{inner}: {message}, got {first['input']!r}.") from None
