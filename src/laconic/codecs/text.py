"""The text in which a configuration names codecs.

::

    "eden:bits=2"                              a name and its settings
    "topk:fraction=0.01 | eden:bits=4"         one after the other; as a list too: ["topk:fraction=0.01", "eden:bits=4"]
    "ef(signsgd)"                              with error feedback
    "by_leaf(head.*: int8, *: eden:bits=2)"    some leaves by one, the others by another
    "my.module:halve:keep=2"                   a function of one's own, and its settings
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from laconic.codecs.catalogue import codecs
from laconic.codecs.compose import Pipeline
from laconic.codecs.feedback import ErrorFeedback, ef
from laconic.codecs.own import own_codec
from laconic.codecs.route import ByLeaf
from laconic.core import Codec, ConfigError, did_you_mean


def parse(text: str | Sequence[str]) -> Codec:
    """The codec that a configuration names.

    >>> parse("float16").text
    'float16'
    >>> parse("flaot16")
    Traceback (most recent call last):
        ...
    laconic.core.errors.ConfigError: unknown codec 'flaot16'; did you mean 'float16'?
    """
    whole = text if isinstance(text, str) else " | ".join(text)
    parts = [_parse_one(part.strip(), whole) for part in _split(whole, "|")]
    codec = parts[0]
    for then in parts[1:]:
        for part in (codec, then):
            if not isinstance(part, Pipeline):
                raise ConfigError(f"[codec] {whole}: {_no_part_of_a_chain(part)}")
        codec = codec | then  # type: ignore[operator]
    return codec


def _parse_one(text: str, whole: str) -> Codec:
    if wrapped := re.fullmatch(r"ef\s*\((.*)\)", text, re.DOTALL):
        return ef(parse(wrapped[1]))
    if wrapped := re.fullmatch(r"by_leaf\s*\((.*)\)", text, re.DOTALL):
        return ByLeaf(tuple(_routes(wrapped[1], whole)))
    name, _, settings = text.partition(":")
    name = name.strip()
    if name in codecs:
        return codecs.build(name, _settings(settings, whole))
    if own := re.fullmatch(r"([\w.]+)\s*:\s*([\w.]+)\s*(?::(.*))?", text, re.DOTALL):
        return own_codec(f"{own[1]}:{own[2]}", _settings(own[3] or "", whole))
    raise ConfigError(f"unknown codec {name!r}; {did_you_mean(name, [*codecs, 'ef', 'by_leaf'])}")


def _no_part_of_a_chain(codec: Codec) -> str:
    if isinstance(codec, ErrorFeedback):
        return "ef(…) wraps a whole codec; write ef(a | b)."
    if isinstance(codec, ByLeaf):
        return "by_leaf(…) is a whole codec; write the chain inside it, by_leaf(*: a | b)."
    return f"only codecs made of stages go before or after another, and {codec.text!r} gives no Pipeline."


def _routes(text: str, whole: str) -> list[tuple[str, Codec]]:
    """Patterns and their codecs. Settings have commas too: what begins with `key=` belongs to the codec before it."""
    parts: list[str] = []
    for part in _split(text, ","):
        if parts and "=" in part.partition(":")[0]:
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    routes = []
    for part in parts:
        pattern, colon, codec = part.partition(":")
        if not (pattern.strip() and colon and codec.strip()):
            raise ConfigError(f"[codec] {whole}: by_leaf takes pattern: codec, …, got {part.strip()!r}.")
        routes.append((pattern.strip(), parse(codec)))
    return routes


def _settings(text: str, whole: str) -> dict[str, Any]:
    pairs = [pair.partition("=") for pair in text.split(",")] if text.strip() else []
    for key, equals, value in pairs:
        if [other.strip() for other, _, _ in pairs].count(key.strip()) > 1:
            raise ConfigError(f"[codec] {whole}: {key.strip()!r} is given twice.")
        if not equals or not key.strip() or not value.strip():
            raise ConfigError(
                f"[codec] {whole}: settings are written key=value, got {(key + equals + value).strip()!r}."
            )
    return {key.strip(): _value(value.strip()) for key, _, value in pairs}


def _split(text: str, separator: str) -> list[str]:
    """Cut at the separators that stand outside parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth < 0:
            break
        if character == separator and not depth:
            parts.append("")
        else:
            parts[-1] += character
    if depth:
        raise ConfigError(f"[codec] {text}: the parentheses don't match.")
    return parts


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
