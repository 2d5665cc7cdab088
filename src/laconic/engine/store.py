"""Where the engine keeps what belongs to clients: packed trees by client, opaque to everyone but the client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping

import safetensors.torch
from torch import Tensor

from laconic.core import Tree


def pack(tree: Mapping[str, Tensor]) -> bytes:
    """A tree as bytes for our own processes and files; an empty tree is no bytes at all."""
    packable: Tree = {}
    seen: set[int] = set()
    for name, leaf in tree.items():
        leaf = leaf.detach().cpu().contiguous()
        # safetensors refuses leaves that share memory: tied weights, or a state that keeps a tree under two names.
        memory = leaf.untyped_storage().data_ptr()
        packable[name] = leaf.clone() if memory in seen else leaf
        seen.add(memory)
    return safetensors.torch.save(packable) if tree else b""


def unpack(blob: bytes) -> Tree:
    """What `pack` packed.

    >>> import torch
    >>> unpack(pack({"a": torch.ones(2)}))
    {'a': tensor([1., 1.])}
    """
    return dict(safetensors.torch.load(blob)) if blob else {}


class ClientStore(MutableMapping[int, bytes]):
    """Packed state by client, in memory. Clients that have none cost nothing."""

    def __init__(self) -> None:
        self._packed: dict[int, bytes] = {}

    def __getitem__(self, client: int) -> bytes:
        return self._packed[client]

    def __setitem__(self, client: int, packed: bytes) -> None:
        if packed:
            self._packed[client] = packed
        else:
            self._packed.pop(client, None)

    def __delitem__(self, client: int) -> None:
        del self._packed[client]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._packed))

    def __len__(self) -> int:
        return len(self._packed)
