"""The server's side and the nodes' side together, without Flower between them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.flower.conftest import METHODS, OTHERS, Village, reference, table_for

from laconic.config import experiment_from
from laconic.core import ConfigError
from laconic.engine import Record, Silent
from laconic.flower.messages import Answer, Call, Envelope
from laconic.flower.nodes import Letter


def sha(table: dict[str, Any]) -> str:
    return str(experiment_from(table).run().summary["state_sha256"])


@pytest.mark.parametrize("name", [*METHODS, *OTHERS])
def test_the_result_is_that_of_the_embedded_engine(name: str) -> None:
    """Two of three clients a round: frames that a client missed are sent again, states wait for their next turn."""
    table = table_for(name, cohort=3 if name == "vardrop" else 2)
    embedded, deployed = experiment_from(table).run(), Village(table, 3).run()
    assert deployed.summary["state_sha256"] == embedded.summary["state_sha256"]
    for ours, theirs in zip(embedded.history, deployed.history, strict=True):
        shared = {k: v for k, v in theirs.items() if k in ours and k != "seconds"}
        assert shared == {k: v for k, v in ours.items() if k != "seconds"}


@pytest.mark.parametrize("name", ["lg_fedavg", "eden"])
def test_an_interrupted_server_finds_its_clients_as_its_checkpoint_left_them(name: str, tmp_path: Path) -> None:
    table = table_for(name, rounds=4, cohort=2)

    class Interrupted(Silent):
        def advanced(self, record: Record) -> None:
            if record["round"] == 3:
                raise RuntimeError("killed")

    first = Village(table, 3)
    with pytest.raises(RuntimeError, match="killed"):
        first.run(out=tmp_path, observer=Interrupted())
    for again in ({"resume": True}, {"overwrite": True}):  # from round 3; and from the start, with what the nodes kept
        run = Village(table, 3, entries=first.entries).run(out=tmp_path, **again)
        assert run.summary["state_sha256"] == sha(table)
        assert run.summary["rejected"] == 0


@pytest.mark.parametrize("name", ["eden", "vardrop"])
def test_a_node_that_lost_its_states_says_so_and_starts_afresh(name: str) -> None:
    table = table_for(name, rounds=4)
    village = Village(table, 3)

    def forgetful(client: int, call: Call, answer: Envelope) -> Envelope:
        if client == 1 and call.round == 2:
            village.entries[1].clear()
        return answer

    village.fault = forgetful
    history = village.run().history
    reasons = [[(x["client"], x["reason"]) for x in record.get("rejections", ())] for record in history]
    assert reasons == [[], [], [(1, "state_lost")], []]
    whole = [call.after is None for call in village.calls if call.kind == "train" and call.client == 1]
    assert whole == [False, False, False, True]


def test_no_reply_at_all_abandons_the_round_at_its_deadline() -> None:
    table = table_for("fedavg", rounds=1)
    began = time.monotonic()
    run = Village(table, 3, fault=lambda client, call, answer: None).run(deadline=1.0)
    assert time.monotonic() - began < 10
    (record,) = run.history
    assert record["abandoned"] == "no reply was accepted"
    assert {x["reason"] for x in record["rejections"]} == {"deadline"}
    assert record["bytes_up"] == 0
    assert record["bytes_down"] > 0


@pytest.mark.parametrize("rounds", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_a_third_of_the_clients_vanish_every_round(rounds: int) -> None:
    """30 of 100 turns are lost; the result is that of exactly the others."""
    table = table_for("fedavg", rounds=rounds, clients=10)
    random = np.random.default_rng(0)
    gone = {number: set(random.permutation(10)[:3].tolist()) for number in range(1, rounds + 1)}
    village = Village(
        table, 10, fault=lambda client, call, answer: None if client in gone.get(call.round, ()) else answer
    )
    run = village.run(deadline=0.5)
    assert [{x["client"] for x in record["rejections"]} for record in run.history] == list(gone.values())
    assert run.summary["state_sha256"] == reference(table, run.history).summary["state_sha256"]


def test_clients_without_a_node_are_offline_and_cost_nothing() -> None:
    table = table_for("fedavg", rounds=2)
    village = Village(table, 3)
    village.online = {0, 2}
    history = village.run(deadline=1.0).history
    assert all([(x["client"], x["reason"]) for x in record["rejections"]] == [(1, "offline")] for record in history)
    whole = experiment_from(table).run().history[0]
    assert history[0]["bytes_down"] * 3 == whole["bytes_down"] * 2


def test_a_second_node_of_a_client_is_not_asked(caplog: pytest.LogCaptureFixture) -> None:
    table = table_for("fedavg", rounds=1)

    class Sybil(Village):
        def nodes(self) -> Iterable[int]:
            return [*super().nodes(), 999]

        def pull(self, names: Iterable[str]) -> Iterable[Letter]:
            to_it = [name for name in names if self.outbox.get(name, (0,))[0] == 999]
            yield from super().pull([name for name in names if name not in to_it])
            for name in to_it:
                del self.outbox[name]
                yield Letter(name, 999, Envelope.around(Answer(kind="here", client=1))._asdict())

    with caplog.at_level(logging.WARNING, logger="laconic"):
        run = Sybil(table, 3).run()
    assert run.summary["state_sha256"] == sha(table)
    assert "says it is client 1" in caplog.text


@dataclass
class Unreliable(Village):
    """A post that repeats letters, brings them late, from the wrong node, or not at all."""

    plan: dict[tuple[int, int], str] = field(default_factory=dict)
    kept: list[Letter] = field(default_factory=list)

    def pull(self, names: Iterable[str]) -> Iterable[Letter]:
        wanted = set(names)
        yield from [letter for letter in self.kept if letter.to in wanted]  # once more
        for letter in super().pull(wanted):
            assert letter.values is not None
            answer = Envelope.of(letter.values).open(Answer)
            fate = self.plan.get((self.calls[-1].round, answer.client), "once") if answer.kind == "done" else "once"
            if fate == "twice":
                self.kept.append(letter)
                yield letter
                yield letter
            elif fate == "replayed":  # an old letter first, under the new name
                for old in self.kept[-1:]:
                    yield old._replace(to=letter.to)
                self.kept.append(letter)
                yield letter
            elif fate == "stranger":
                yield letter._replace(node=7)
            elif fate == "once":
                self.kept.append(letter)
                yield letter


_FATES = st.sampled_from(["once", "twice", "replayed", "stranger", "lost"])
_TABLE = {**table_for("fedavg", rounds=2), "model": {"name": "mlp", "hidden": [4]}}
_TABLE["method"] = {"name": "fedavg", "local_steps": 1}


@given(st.dictionaries(st.tuples(st.integers(1, 2), st.integers(0, 2)), _FATES, max_size=6))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_reply_counts_once_or_not_at_all(plan: Mapping[tuple[int, int], str]) -> None:
    """Whatever the post does: the result is that of the replies that the records say were counted."""
    run = Unreliable(_TABLE, 3, plan=dict(plan)).run(deadline=0.5)
    lost = {record["round"]: {x["client"] for x in record.get("rejections", ())} for record in run.history}
    for (number, client), fate in plan.items():
        assert (client in lost[number]) or fate not in ("stranger", "lost")
    same = Village(_TABLE, 3, fault=lambda client, call, answer: None if client in lost[call.round] else answer)
    assert run.summary["state_sha256"] == same.run(deadline=0.3).summary["state_sha256"]


def test_what_needs_all_data_in_one_place_is_refused() -> None:
    table = table_for("lg_fedavg", new_test=True)
    with pytest.raises(ConfigError, match=r"run\.new_test needs all clients' data in one place"):
        Village(table, 3).run()


@pytest.mark.parametrize("name", ["round", "bytes_up", "global_accuracy"])
def test_a_client_cannot_write_into_the_records(name: str) -> None:
    def forged(client: int, call: Call, answer: Envelope) -> Envelope:
        if client or call.kind != "train":
            return answer
        said = answer.open(Answer).model_copy(update={"metrics": {name: 0.0}})
        return Envelope.around(said, answer.frames())

    (record,) = Village(table_for("fedavg", rounds=1), 3, fault=forged).run().history
    assert [(x["client"], x["reason"]) for x in record["rejections"]] == [(0, "envelope")]
    assert record["round"] == 1
