"""Models of tokens with every method: embeddings, recurrent layers, attention, tied weights, padding."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import laconic as lc
from laconic.core import IGNORED, ConfigError, predictions, token_loss
from laconic.methods import methods
from laconic.models import models


def sentences(clients: int = 4, length: int = 12) -> lc.Federation:
    """Numbers that count up modulo 7, of unequal lengths."""
    rng = np.random.default_rng(0)
    parts = []
    for _ in range(clients):
        starts, sizes = rng.integers(0, 7, 20), rng.integers(3, length + 1, 20)
        parts.append(
            lc.data.next_tokens([(np.arange(n + 1) + s) % 7 for s, n in zip(starts, sizes, strict=True)], length=length)
        )
    return lc.Federation.from_clients(parts)


class Attends(nn.Module):
    """A block of a transformer, its output weights tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.norm = nn.LayerNorm(8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        n = self.norm(h)
        h = h + self.attend(n, n, n, need_weights=False)[0]
        return self.head(h + self.down(torch.relu(self.up(h))))


class Own(nn.Linear):
    """A linear layer that somebody has a name for."""


class Recurrent(nn.Module):
    """A GRU with a subclass of Linear behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(7, 6), nn.GRU(6, 8, batch_first=True)
        self.fc, self.head = Own(8, 10), nn.Linear(10, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.fc(self.gru(self.embed(x))[0])))


_SETTINGS = {"fedpm": {"scale": "kaiming"}, "vardrop": {}, "mtl": {}, "lg_fedsparse": {"private": ["embed.*"]}}
_SMALL = {"embedding": 4, "hidden": 8, "width": 10}


@pytest.mark.parametrize("net", ["char_lstm", Attends, Recurrent], ids=["lstm", "attention", "gru"])
@pytest.mark.parametrize("name", list(methods))
def test_every_method_trains_it(name: str, net: object) -> None:
    model = (lambda: models.build("char_lstm", _SMALL, given=((12,), 7))) if net == "char_lstm" else net
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = lc.fit(
            data=sentences(),
            model=model,  # type: ignore[arg-type]
            method=methods.build(name, _SETTINGS.get(name, {"local_epochs": 1})),
            rounds=2,
            cohort=4,
            eval_every=2,
            workers=0,
        )
    assert math.isfinite(run.summary.get("global_perplexity", 1.0))
    assert run.summary["bytes_up"] >= 0
    told = {str(one.message) for one in said if "dense" in str(one.message)}
    assert len(told) == (1 if name in {"fedsparse", "feddrop", "vardrop", "lg_fedsparse"} else 0), told


def test_it_learns_to_count() -> None:
    run = lc.fit(
        data=sentences(8),
        model="char_lstm",
        method=lc.fedavg(optimizer="adam", lr=0.02, local_epochs=5),
        rounds=5,
        cohort=8,
        eval_every=5,
        workers=0,
    )
    assert run.summary["global_accuracy"] > 0.95
    assert run.summary["global_perplexity"] == pytest.approx(math.exp(run.summary["global_loss"]))


def test_dense_says_that_it_is_meant() -> None:
    method = lc.fedsparse(dense=("embed.*", "lstm.*"), local_epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = lc.fit(data=sentences(), model="char_lstm", method=method, rounds=1, cohort=2, workers=0)
    assert "sparsity" in run.summary or run.summary["global_loss"] > 0


def test_what_is_left_to_no_method_is_refused_with_what_to_write() -> None:
    def net() -> nn.Module:
        return models.build("char_lstm", {**_SMALL, "width": 0}, given=((12,), 7))

    for name, says in (("fedsparse", "gate_output = true"), ("feddrop", "Put one there")):
        with pytest.raises(ConfigError, match=says):
            lc.fit(data=sentences(), model=net, method=name, rounds=1, cohort=2, workers=0)


def test_padding_changes_neither_loss_nor_metrics() -> None:
    torch.manual_seed(0)
    output, target = torch.randn(2, 5, 4), torch.tensor([[1, 2, 3, 0, 1], [2, 0, 3, IGNORED, IGNORED]])
    rows, labels = predictions(output, target)
    assert torch.equal(rows, torch.cat([output[0], output[1, :3]]))
    assert torch.allclose(token_loss(output, target), nn.functional.cross_entropy(rows, labels))
    assert float(token_loss(output, torch.full((2, 5), IGNORED))) == 0.0
    by_torch = nn.functional.cross_entropy(output.movedim(2, 1), target)
    assert torch.allclose(token_loss(output.movedim(2, 1), target), by_torch)


def test_targets_of_maps_go_with_classes_as_the_second_axis() -> None:
    x, y = np.random.default_rng(0).random((40, 1, 6, 6), dtype=np.float32), np.zeros((40, 6, 6), dtype=np.int64)
    y[x[:, 0] > 0.5] = 1
    y[:, 0] = IGNORED
    run = lc.fit(
        data=lc.Federation.from_arrays((x, y), clients=4),
        model=lambda: nn.Conv2d(1, 2, 1),
        method=lc.fedavg(lr=1.0),
        rounds=3,
        cohort=4,
        eval_every=3,
        workers=0,
    )
    assert run.summary["global_accuracy"] > 0.9


def test_partitions_by_class_ask_for_one_class_per_example() -> None:
    data = sentences()
    assert data.label_counts().sum() == int((data.y[data.train_rows.flat] != IGNORED).sum())
    with pytest.raises(lc.DataError):
        lc.Federation.from_arrays((data.x, data.y), clients=2, partition={"kind": "dirichlet", "alpha": 0.5})
