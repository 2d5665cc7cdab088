"""A codec of one's own by name: "module.path:function", for configurations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast, get_type_hints

from laconic.codecs.compose import Pipeline
from laconic.codecs.feedback import ErrorFeedback, with_memory
from laconic.codecs.naming import named
from laconic.codecs.wire import CodecId
from laconic.core import (
    Codec,
    ConfigError,
    LaconicError,
    Shared,
    Spec,
    Traits,
    Tree,
    checked_settings,
    find_object,
    traits_of,
)

_SETTABLE = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class Own:
    """A codec under the name by which a configuration found it, so that both ends and config.toml agree on it."""

    codec: Codec
    text: str

    @property
    def id(self) -> int:
        """Its number on the wire, among those of users' own codecs."""
        return max(self.codec.id, CodecId.CUSTOM)

    @property
    def traits(self) -> Traits:
        """What it declares."""
        return traits_of(self.codec)

    def with_memory(self) -> Own:
        """What it does where what it loses is sent later, under the same name."""
        return replace(self, codec=with_memory(self.codec))

    def init_state(self, spec: Spec) -> Tree:
        """The sender's first state."""
        return self.codec.init_state(spec)

    def encode(self, tree: Tree, shared: Shared, state: Tree) -> tuple[bytes, Tree]:
        """The bytes of a tree, and the sender's new state."""
        return self.codec.encode(tree, shared, state)

    def decode(self, blob: bytes, spec: Spec, shared: Shared) -> Tree:
        """The tree that the bytes stand for."""
        return self.codec.decode(blob, spec, shared)


def own_codec(name: str, settings: Mapping[str, Any]) -> Codec:
    """The codec that a user's function "module.path:function" makes; what it can be given by name are its settings.

    >>> own_codec("laconic.codecs:topk", {"fraction": 0.1}).text
    'laconic.codecs:topk:fraction=0.1'
    """
    function = find_object(name, what="codec")
    try:
        settable = _settable(function)
        arguments = checked_settings(settable, settings, where=f"[codec] {name}")
        made = settable(**arguments)
    except LaconicError:
        raise
    except Exception as error:  # a user's own code: whatever it says is about this codec
        said = " ".join(str(error).split())
        raise ConfigError(f"codec {name!r} failed with {type(error).__name__} ({said}).") from error
    if not isinstance(made, Codec):
        raise ConfigError(
            f"codec {name!r} must give a codec (text, id, init_state, encode and decode), got {type(made).__name__}."
        )
    if isinstance(made, ErrorFeedback):
        raise ConfigError(f"codec {name!r} must give {made.codec.text!r} itself; write ef({name}) for error feedback.")
    text = named(name, inspect.signature(settable), arguments)
    if isinstance(made, Pipeline):  # so that others can follow it
        return replace(made, text=text, id=max(made.id, CodecId.CUSTOM))
    return Own(made, text)


def _settable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with all that can be given by name as its settings; what has no type takes any."""
    hints = get_type_hints(cast(Any, function).__init__ if isinstance(function, type) else function)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind in _SETTABLE]

    def make(**settings: Any) -> Any:
        return function(**settings)

    make.__signature__ = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in parameters])  # type: ignore[attr-defined]
    make.__annotations__ = {p.name: hints.get(p.name, Any) for p in parameters}
    return make
