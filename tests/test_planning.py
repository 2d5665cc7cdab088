"""What a run will cost, against what it did cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import laconic as lc
from laconic.cli import app
from laconic.core import ConfigError
from laconic.planning import NETWORKS, Network, network_of

RUNS: dict[str, dict[str, Any]] = {
    "float32": {},
    "all take part": {"cohort": 20, "up": "eden:bits=1", "down": "eden:bits=1"},
    "a tenth takes part": {"cohort": 2, "up": "eden:bits=1", "down": "eden:bits=4"},
    "sparse": {"up": "topk:fraction=0.05", "down": "int8"},
    "error feedback": {"up": "ef(topk:fraction=0.05)"},
    "qsgd": {"up": "qsgd:levels=16"},
    "scaffold": {"method": "scaffold"},
    "ditto": {"method": "ditto", "up": "eden:bits=2"},
    "lg": {"method": "lg_fedavg"},
    "feddrop": {"method": "feddrop"},
    "fedopt": {"method": "fedopt", "cohort": 10, "down": "eden:bits=2"},
    "fedprox": {"method": "fedprox", "up": "float16", "down": "float16"},
}


def run(**given: Any) -> dict[str, Any]:
    """A run of which a few rounds are rehearsed."""
    usual = {"data": lc.data.digits(clients=20), "model": "mlp", "rounds": 30, "cohort": 5, "workers": 0}
    return {**usual, **given}


@pytest.mark.parametrize("name", RUNS)
def test_bytes_are_those_of_the_run(name: str) -> None:
    # Where clients hold what they missed, the cost of a contact settles in the course of a run: that takes all of it.
    patient = {"a tenth takes part", "sparse", "lg", "fedopt"}
    found = lc.plan(**run(**RUNS[name]), seconds=1e6 if name in patient else 1)
    real = lc.fit(**run(**RUNS[name]), eval_every=30, evaluations=["global"]).summary
    for way, key in ((found.up, "bytes_up"), (found.down, "bytes_down")):
        assert way.bytes == pytest.approx(real[key], rel=0.03)
        if way.kind == "exact":
            assert way.bytes == real[key]


def test_an_estimate_says_so() -> None:
    found = lc.plan(**run(method=lc.fedpm(local_epochs=1), model="mlp"), seconds=0.3)
    assert found.rehearsed < 30
    assert found.up.kind == "estimate"


def test_time_is_that_of_the_network() -> None:
    given = run(rounds=2)
    slow, fast = (lc.plan(**given, network=name) for name in ("iot", "lan"))
    assert slow.up == fast.up
    assert slow.network_seconds == pytest.approx(1.0 + 8 * slow.down.per_client / 100e3 + 8 * slow.up.per_client / 60e3)
    assert slow.network_seconds > 100 * fast.network_seconds
    assert set(NETWORKS) == {"lan", "dsl", "4g", "3g", "iot"}
    assert network_of("up=64kbit,down=1Gbit") == Network(64e3, 1e9, 0.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [("5g", "there is no network '5g'"), ("up=5", "a network is a name or"), ("up=5,down=5Mbit", "a rate is written"),
     ("up=5Mbit,down=5Mbit,rtt=3", "a delay is written"), ("up=5Mbit,down=5Mbit,loss=3", "a network is a name or")],
)  # fmt: skip
def test_networks_that_are_none(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        network_of(text)


def test_states_of_clients_are_counted() -> None:
    found = lc.plan(**run(method="scaffold", rounds=8))
    assert found.states_bytes >= 20 * 4 * found.parameters
    assert lc.plan(**run(rounds=2)).states_bytes == 0


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[run]\nrounds = 3\ncohort = 2\n[data]\nsource = "digits"\nclients = 4\n')
    shown = CliRunner().invoke(app, ["plan", str(file)])
    assert shown.exit_code == 0, shown.output
    assert "3 of 3 rounds" in shown.output
    told = CliRunner().invoke(app, ["plan", str(file), "--json", "--network", "iot"])
    assert json.loads(told.stdout)["up"]["kind"] == "exact"
