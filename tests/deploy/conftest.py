"""Deployments that tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.deploy.stack import Stack
from tests.flower.conftest import table_for


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One SuperLink and three SuperNodes, TLS and authentication; nothing may be left of it."""
    pytest.importorskip("flwr", reason="needs the extra flower")
    made = Stack(Path(tmp_path_factory.mktemp("deploy")), table_for("fedavg"))
    try:
        made.up()
        yield made
    finally:
        left = made.down()
    assert left == []
