"""Precision and layout: settings of a run, recorded, the same bits for any number of workers."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import laconic as lc
from laconic import experiment as module
from laconic.core import ConfigError, DataError, RunError


def images() -> lc.Federation:
    rng = np.random.default_rng(0)
    y = np.arange(120) % 3
    x = rng.normal(size=(120, 2, 8, 8)) + y[:, None, None, None]
    return lc.Federation.from_arrays((x.astype(np.float32), y), clients=4)


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3))


def run(**settings: Any) -> lc.Run:
    given = {"method": lc.fedavg(lr=0.05, local_epochs=1), "rounds": 2, "cohort": 3, "workers": 0}
    return lc.fit(data=images(), model=net, **{**given, **settings})


@pytest.fixture(autouse=True)
def arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "bfloat16_arithmetic", lambda: True)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_bfloat16_is_the_same_bits_for_any_number_of_workers(layout: str) -> None:
    found = {w: run(precision="bfloat16", layout=layout, workers=w).summary["state_sha256"] for w in (0, 1, 2)}
    assert len(set(found.values())) == 1


def test_bfloat16_is_another_computation_near_float32s() -> None:
    one, other = run(precision="float32"), run(precision="bfloat16")
    assert one.summary["state_sha256"] != other.summary["state_sha256"]
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert a.dtype == b.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0.1, atol=0.02)
    assert one.summary["bytes_up"] == other.summary["bytes_up"], "messages stay float32"


@pytest.mark.parametrize(
    "method",
    [
        lc.fedpm(lr=0.1, local_epochs=1),
        lc.fedsparse(lr=0.05, local_epochs=1),
        lc.vardrop(local_steps=2),
        lc.feddrop(lr=0.05, local_epochs=1),
        lc.scaffold(lr=0.05, local_epochs=1),
        lc.lg_fedavg(lr=0.05, local_epochs=1, objective="autoencoder"),
        lc.apfl(lr=0.05, local_epochs=1),
    ],
    ids=lambda method: method.name,
)
def test_every_kind_of_method_learns_in_bfloat16(method: lc.Method) -> None:
    found = run(method=method, precision="bfloat16", rounds=3)
    assert found.summary["rejected"] == 0
    losses = [record.clients["train_loss"] for record in found.history]
    assert all(np.isfinite(losses))


def test_auto_takes_channels_last_for_convolutions_and_says_so(tmp_path: Path) -> None:
    run(out=tmp_path)
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["run"]["layout"] == "channels_last"
    flat = lc.fit(data=images(), model="mlp", rounds=1, cohort=2, workers=0, out=tmp_path, name="flat")
    assert flat.directory is not None
    assert tomllib.loads((flat.directory / "config.toml").read_text())["run"]["layout"] == "contiguous"


@pytest.mark.parametrize(("setting", "other"), [("layout", "contiguous"), ("precision", "bfloat16")])
def test_resuming_compares_them(tmp_path: Path, setting: str, other: str) -> None:
    run(out=tmp_path)
    with pytest.raises(RunError, match=f"run.{setting} was"):
        run(out=tmp_path, resume=True, **{setting: other})


def test_a_layout_that_the_data_cannot_have() -> None:
    with pytest.raises(DataError, match="channels_last is for images, got examples of shape"):
        lc.fit(data=lc.data.synthetic(clients=3), rounds=1, cohort=2, layout="channels_last")


def test_a_precision_that_the_device_cannot_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no autocast for this device.\nmore")

    monkeypatch.setattr(torch, "autocast", refuse)
    with pytest.raises(ConfigError, match=r"^run.precision 'bfloat16' cannot be used on 'cpu': no autocast for this"):
        run(precision="bfloat16")


def test_a_processor_without_the_arithmetic_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "bfloat16_arithmetic", lambda: False)
    with pytest.warns(RuntimeWarning, match="no bfloat16 arithmetic") as warned:
        run(precision="bfloat16", rounds=1)
    assert len(warned) == 1
