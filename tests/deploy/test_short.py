"""A real deployment in short: TLS, authentication, two nodes, two rounds. The long version is `make deploy-test`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.deploy.stack import Stack
from tests.flower.conftest import table_for

from laconic.config import experiment_from


def test_two_rounds_on_real_processes(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs the extra flower")
    table = table_for("eden", rounds=2, clients=2)
    table["deploy"] = {"deadline": 200.0}
    stack = Stack(tmp_path, table)
    try:
        stack.up()
        stack.submit(table)
        summary = stack.finished("eden")
    finally:
        left = stack.down()
    assert left == [], "processes were left behind"
    embedded = experiment_from(table).run().summary
    for key in ("state_sha256", "bytes_up", "bytes_down", "global_accuracy", "local_accuracy", "rejected"):
        assert summary[key] == embedded[key]
    assert summary["transport_bytes_up"] > summary["bytes_up"]
