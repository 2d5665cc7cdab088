"""How a codec is written: its name, and of its settings those that differ from their defaults."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping


def named(name: str, signature: inspect.Signature, settings: Mapping[str, object]) -> str:
    """The canonical text of a codec that a function of this signature makes.

    >>> def eden(bits: float, *, per_leaf: bool = False) -> None: ...
    >>> named("eden", inspect.signature(eden), {"bits": 2.0, "per_leaf": False})
    'eden:bits=2'
    """
    given = ",".join(
        f"{key}={_value_text(settings[key])}"
        for key, parameter in signature.parameters.items()
        if key in settings and parameter.default != settings[key]
    )
    return f"{name}:{given}" if given else name


def _value_text(value: object) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)
