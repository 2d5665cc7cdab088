"""The server's side and the nodes' side together, without Flower between them."""

from __future__ import annotations

import pytest

from laconic.config import experiment_from
from tests.flower.conftest import METHODS, Village, table_for


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("cohort", [2, 3])
def test_the_result_is_that_of_the_embedded_engine(name: str, cohort: int) -> None:
    table = table_for(name, cohort=cohort)
    embedded, deployed = experiment_from(table).run(), Village(table, 3).run()
    assert deployed.summary["state_sha256"] == embedded.summary["state_sha256"]
    for ours, theirs in zip(embedded.history, deployed.history, strict=True):
        assert {k: v for k, v in theirs.items() if k in ours and k != "seconds"} == {
            k: v for k, v in ours.items() if k != "seconds"
        }
