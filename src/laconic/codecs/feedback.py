"""Error feedback: what a codec lost this time is added to what is sent the next time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from laconic.codecs.vector import floating
from laconic.core import Codec, ConfigError, Shared, Spec, Traits, Tree, exact_names, spec_of, traits_of


@dataclass(frozen=True)
class ErrorFeedback:
    """A codec whose sender keeps the residual e between rounds (Seide et al., 2014; Karimireddy et al., 2019)::

        blob = encode(x + e)        e' = x + e − decode(blob)

    so that all that was decoded, and the residual, add up to all that was to be sent. The receiver needs nothing of
    it: on the wire it is the codec inside. The state is one residual per floating-point leaf.
    """

    codec: Codec

    def __post_init__(self) -> None:
        if isinstance(self.codec, ErrorFeedback):
            raise ConfigError(f"ef({self.codec.text}): one error feedback is enough.")

    @property
    def text(self) -> str:
        """The codec as it is written in a configuration."""
        return f"ef({self.codec.text})"

    @property
    def id(self) -> int:
        """The number of the codec inside."""
        return self.codec.id

    @property
    def traits(self) -> Traits:
        """Those of the codec inside, but for the residual of earlier rounds that a message carries as well."""
        inner = traits_of(self.codec)
        return replace(inner, unbiased=inner.exact)

    def init_state(self, spec: Spec) -> Tree:
        """No residual yet."""
        ragged = [name for name, leaf in spec.items() if leaf.length is not None]
        if ragged:
            raise ConfigError(
                f"{self.text}: error feedback needs messages of one shape, but the length of {ragged[0]!r} varies; "
                f"write {self.codec.text!r}."
            )
        self.codec.init_state(spec)  # what the codec inside cannot take is said now
        return {
            name: torch.zeros(leaf.shape, dtype=leaf.dtype) for name, leaf in floating(spec, exact_names(spec)).items()
        }

    def encode(self, tree: Tree, shared: Shared, state: Tree) -> tuple[bytes, Tree]:
        """The payload of the tree and what was lost before; the new state is what is lost now."""
        wanted = {name: leaf.detach() + state[name] if name in state else leaf.detach() for name, leaf in tree.items()}
        blob, _ = self.codec.encode(wanted, shared, {})
        spec = spec_of(wanted)
        decoded = self.codec.decode(blob, spec, shared)
        return blob, {name: wanted[name] - decoded[name] for name in floating(spec, shared.exact)}

    def decode(self, blob: bytes, spec: Spec, shared: Shared) -> Tree:
        """What the codec inside decodes."""
        return self.codec.decode(blob, spec, shared)


def ef(codec: Codec) -> Codec:
    """Error feedback around any codec, `ef(signsgd())`: what was lost is sent later.

    >>> from laconic.codecs import signsgd
    >>> from laconic.core import Key
    >>> tree, shared = {"w": torch.tensor([3.0, 1.0])}, Shared(Key.from_seed(0))
    >>> blob, residual = ef(signsgd()).encode(tree, shared, {})
    >>> residual["w"]
    tensor([ 1., -1.])
    """
    return ErrorFeedback(codec)
