"""Golden runs: what every method gives over five links, three rounds each, so that nothing moves unnoticed.

Every row is run twice: in one go without workers, and with two workers, stopped after the second round and resumed. The
hashes hold for one build of torch on one kind of processor; elsewhere the first of the rows that a machine computes
differently (`CANARY`) says so, and only what no rounding decides is compared.

After a change that is meant to move figures: `python tests/golden/test_golden_runs.py`, and say so in the changelog.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic as lc
from laconic.core import Key, tree_sha256
from laconic.engine import Silent
from laconic.methods import methods

FILE = Path(__file__).with_name("runs.json")
SHORT = {"lr": 0.1, "local_epochs": 1, "batch_size": 20}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("fedavg", "fedprox", "fedopt", "fedmedian", "fedensemble", "feddrop", "mtl")},
    **{name: (name, {}) for name in ("fedsparse", "lg_fedavg", "lg_fedsparse", "local_only", "fedmask", "fedpm")},
    "fedavg by examples": ("fedavg", {"weighting": "examples"}),
    "fedsparse, closed": ("fedsparse", {"lambda0": 1e-3, "temperature": 0.05, "threshold_lr": 0.1}),
    "fedpm, kept optimizer": ("fedpm", {"persist_optimizer": True}),
    "fedpm, private": ("fedpm", {"privacy": {"c": 0.2, "epsilon": 4.0}}),
    "fedpm, ensemble": ("fedpm", {"evaluate": "ensemble"}),
    "lg_fedavg, goal": ("lg_fedavg", {"goal": 0.3, "goal_on": "test"}),
    "lg_fedavg, two phases": ("lg_fedavg", {"fedavg_rounds": 1, "lg_lr": 0.05, "warmup_epochs": 1}),
    "lg_fedavg, autoencoder": ("lg_fedavg", {"objective": "autoencoder", "start": "own"}),
    "vardrop": ("vardrop", {"lr": 0.01, "local_steps": 1}),
    "vardrop, shared": ("vardrop", {"lr": 0.01, "local_steps": 1, "share_alpha": True}),
    "vardrop, averaged": ("vardrop", {"lr": 0.01, "local_steps": 4}),
    **{name: (name, {}) for name in ("scaffold", "feddyn", "ditto", "apfl", "fedper", "fedrep", "fedbabu")},
}
LINKS = {
    "preferred": (None, None),
    "float32": ("float32", "float32"),
    "float16": ("float16", "float16"),
    "eden": ("eden:bits=2", "eden:bits=4"),
    "topk": ("ef(topk:fraction=0.3 | int8)", "int8"),
}
ROWS = [f"{method} | {link}" for method in METHODS for link in LINKS]


class Stop(Silent):
    """Interrupts a run, as Ctrl-C does, when it has made so many rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def advanced(self, record: Any) -> None:
        if record["round"] == self.rounds:
            raise KeyboardInterrupt


def run(row: str, out: Path, *, workers: int, **how: Any) -> dict[str, Any]:
    """What a row of the table gives."""
    method, link = row.split(" | ")
    name, settings = METHODS[method]
    data = lc.data.digits(clients=6, partition={"kind": "dirichlet", "alpha": 1.0})
    up, down = LINKS[link]
    made = lc.fit(
        data=data,
        method=methods.build(name, {**SHORT, **settings}),
        rounds=3,
        cohort=6 if name == "vardrop" and settings["local_steps"] == 1 else 4,
        eval_every=1,
        up=up,
        down=down,
        seed=7,
        workers=workers,
        out=out,
        checkpoint_every=1,
        **how,
    )
    kept = ("bytes_up", "bytes_down", "paper_bytes", "global_accuracy", "local_accuracy", "state_sha256", "rejected")
    found = {key: made.summary[key] for key in kept}
    file = out / "run" / "model.lac"
    found["model"] = hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else None
    return found


def outcome(row: str, out: Path, *, workers: int, resumed: bool = False) -> dict[str, Any]:
    """What a row gives, or the sentence that refuses it."""
    try:
        if resumed:
            with pytest.raises(KeyboardInterrupt):
                run(row, out, workers=workers, observer=Stop(2))
        return run(row, out, workers=workers, resume=resumed)
    except lc.ConfigError as error:
        return {"refused": str(error)}


def canary() -> str:
    """A hash of a little training: another processor or torch rounds otherwise, and everything else with it."""
    x, y = torch.randn(60, 64, generator=Key.from_seed(0).torch()), torch.arange(60) % 10
    weight = torch.zeros(10, 64, requires_grad=True)
    for _ in range(5):
        (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(x @ weight.T, y), [weight])
        weight = (weight - gradient).detach().requires_grad_()
    return tree_sha256({"w": weight})


def table() -> dict[str, Any]:
    return json.loads(FILE.read_text())


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_table_has_every_row() -> None:
    assert list(table()["rows"]) == ROWS


@pytest.mark.parametrize("row", ROWS)
def test_nothing_moved(row: str, tmp_path: Path) -> None:
    golden = table()
    same_machine = golden["canary"] == canary()
    for name, how in (("alone", {"workers": 0}), ("resumed", {"workers": 2, "resumed": True})):
        found, expected = outcome(row, tmp_path / name, **how), golden["rows"][row]
        if not same_machine:
            # Rounding decides no more than the lengths of frames that are as long as their values are many.
            assert found.keys() == expected.keys()
            continue
        assert found == expected, name


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = {}
    for row in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            rows[row] = outcome(row, Path(folder), workers=0)
        print(row, rows[row].get("refused", rows[row].get("global_accuracy")), file=sys.stderr)
    FILE.write_text(json.dumps({"canary": canary(), "rows": rows}, indent=1) + "\n")
