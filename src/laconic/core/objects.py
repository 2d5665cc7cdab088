"""A user's own code by name: "module.path:Name"."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from laconic.core.errors import ConfigError, did_you_mean


def find_object(text: str, *, what: str, folder: Path | None = None) -> Callable[..., Any]:
    """The object that "module.path:Name" names: something that can be called.

    Modules are also looked for in `folder` (the current one by default), as `python -m` does. `what` names the
    setting in errors.

    >>> find_object("math:sqrt", what="loss")(9)
    3.0
    """
    if refusal := _REFUSAL.get():
        raise ConfigError(f"{what} {text!r} is code, {refusal}")
    path, colon, name = text.partition(":")
    if not (path and colon and name):
        raise ConfigError(f'{what} {text!r} must have the form "module.path:Name".')
    with _importing_from(folder or Path.cwd()):
        try:
            found: Any = importlib.import_module(path)
        except (Exception, SystemExit) as error:
            said = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"{what} {text!r}: cannot import {path!r} ({said}).") from error
    for part in name.split("."):
        if not hasattr(found, part):
            names = [known for known in dir(found) if not known.startswith("_")]
            hint = did_you_mean(part, names) if names else "it is empty."
            raise ConfigError(f"{what} {text!r}: {path!r} has no {name!r}; {hint}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{what} {text!r} must be something that can be called, got {type(found).__name__}.")
    return found  # type: ignore[no-any-return]


_REFUSAL: ContextVar[str] = ContextVar("refusal", default="")


@contextmanager
def without_code(reason: str) -> Iterator[None]:
    """No code is found by its name meanwhile; `reason` says why, after "… is code,".

    >>> with without_code("and today is Sunday."):
    ...     find_object("math:sqrt", what="loss")
    Traceback (most recent call last):
        ...
    laconic.core.errors.ConfigError: loss 'math:sqrt' is code, and today is Sunday.
    """
    token = _REFUSAL.set(reason)
    try:
        yield
    finally:
        _REFUSAL.reset(token)


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Find modules in `folder` first; afterwards `sys.path` is what it was."""
    entry = str(folder)
    sys.path.insert(0, entry)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if entry in sys.path:
            sys.path.remove(entry)
