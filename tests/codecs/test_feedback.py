from __future__ import annotations

import pytest
import torch

from laconic.codecs import ef, parse
from laconic.core import Key, Shared, Tree, spec_of


def update(round: int) -> Tree:
    random = torch.Generator().manual_seed(round)
    return {
        "w": torch.randn(20, 30, generator=random),
        "mask": torch.ones(3, dtype=torch.bool),
        "b": torch.randn(5, generator=random, dtype=torch.float64),
    }


@pytest.mark.parametrize("text", ["signsgd", "topk:fraction=0.05 | int8", "drive_mse", "float16", "terngrad"])
def test_what_was_applied_and_the_residual_add_up_to_what_was_meant(text: str) -> None:
    codec, state = ef(parse(text)), {}
    sent = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in update(0).items() if name != "mask"}
    meant = {name: leaf.clone() for name, leaf in sent.items()}
    for turn in range(20):
        tree, shared = update(turn), Shared(Key.from_seed(turn))
        blob, state = codec.encode(tree, shared, state)
        decoded = codec.decode(blob, spec_of(tree), shared)
        for name in sent:
            sent[name] += decoded[name]
            meant[name] += tree[name]
    assert set(state) == {"w", "b"}
    for name in sent:
        torch.testing.assert_close(sent[name] + state[name].double(), meant[name], rtol=1e-4, atol=1e-4)


def test_an_empty_state_is_no_residual() -> None:
    codec, shared = parse("ef(topk:fraction=0.1)"), Shared(Key.from_seed(0))
    first = codec.init_state(spec_of(update(0)))
    assert codec.encode(update(0), shared, {})[0] == codec.encode(update(0), shared, first)[0]


def test_top_k_with_feedback_gets_everything_across_in_the_end() -> None:
    codec, tree = parse("ef(topk:fraction=0.1)"), {"w": torch.linspace(-1, 1, 100)}
    zero, state, total = {"w": torch.zeros(100)}, codec.init_state(spec_of(tree)), torch.zeros(100)
    for turn in range(12):
        shared = Shared(Key.from_seed(turn))
        blob, state = codec.encode(tree if turn == 0 else zero, shared, state)
        total += codec.decode(blob, spec_of(tree), shared)["w"]
    torch.testing.assert_close(total, tree["w"])
