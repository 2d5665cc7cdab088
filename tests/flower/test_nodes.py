"""The server's side and the nodes' side together, without Flower between them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.flower.conftest import METHODS, OTHERS, Village, reference, table_for

from laconic.config import experiment_from
from laconic.core import ConfigError, Population, RunError
from laconic.engine import Record, Silent
from laconic.flower.messages import Answer, Call, Envelope
from laconic.flower.node import _built
from laconic.flower.nodes import TransportReply
from laconic.methods import methods
from laconic.testing import small_task


def sha(table: dict[str, Any]) -> str:
    return str(experiment_from(table).run().summary["state_sha256"])


@pytest.mark.parametrize("name", [*METHODS, *OTHERS])
def test_the_result_is_that_of_the_embedded_engine(name: str) -> None:
    """Two of three clients a round: frames that a client missed are sent again, states wait until they are needed."""
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


KEEPING = [name for name in methods if methods.build(name, {}).bind(small_task(), Population(6, 6)).personal]


@pytest.mark.parametrize("name", ["eden", *KEEPING])
def test_a_node_that_lost_its_states_says_so_and_starts_afresh(name: str) -> None:
    """Every method whose clients keep something."""
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
    if name in ("eden", "vardrop"):
        whole = [call.after is None for call in village.calls if call.kind == "train" and call.client == 1]
        assert whole == [False, False, False, True]


def test_no_reply_at_all_abandons_the_round_at_its_deadline() -> None:
    table = table_for("fedavg", rounds=1)
    seen: list[Record] = []

    class Seeing(Silent):
        def advanced(self, record: Record) -> None:
            seen.append(record)

    began = time.monotonic()
    with pytest.raises(RunError, match=r"^every one of the 1 rounds was abandoned.*no reply was accepted.*deadline"):
        Village(table, 3, fault=lambda client, call, answer: None).run(deadline=1.0, observer=Seeing())
    assert time.monotonic() - began < 10
    (record,) = seen
    assert record["abandoned"] == "no reply was accepted"
    assert {x["reason"] for x in record["rejections"]} == {"deadline"}
    assert record["bytes_up"] == 0
    assert record["bytes_down"] > 0


@pytest.mark.parametrize("rounds", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_a_third_of_the_clients_vanish_every_round(rounds: int) -> None:
    """30 of 100 local updates are lost; the result is that of exactly the others."""
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

        def pull(self, names: Iterable[str]) -> Iterable[TransportReply]:
            to_it = [name for name in names if self.outbox.get(name, (0,))[0] == 999]
            yield from super().pull([name for name in names if name not in to_it])
            for name in to_it:
                del self.outbox[name]
                yield TransportReply(name, 999, Envelope.around(Answer(kind="here", client=1))._asdict())

    with caplog.at_level(logging.WARNING, logger="laconic"):
        run = Sybil(table, 3).run()
    assert run.summary["state_sha256"] == sha(table)
    assert "says it is client 1" in caplog.text


@dataclass
class Unreliable(Village):
    """A transport that repeats replies, brings them late, from the wrong node, or not at all."""

    plan: dict[tuple[int, int], str] = field(default_factory=dict)
    kept: list[TransportReply] = field(default_factory=list)

    def pull(self, names: Iterable[str]) -> Iterable[TransportReply]:
        wanted = set(names)
        yield from [reply for reply in self.kept if reply.to in wanted]  # once more
        for reply in super().pull(wanted):
            assert reply.values is not None
            answer = Envelope.of(reply.values).open(Answer)
            fate = self.plan.get((self.calls[-1].round, answer.client), "once") if answer.kind == "done" else "once"
            if fate == "twice":
                self.kept.append(reply)
                yield reply
                yield reply
            elif fate == "replayed":  # an old reply first, under the new name
                for old in self.kept[-1:]:
                    yield old._replace(to=reply.to)
                self.kept.append(reply)
                yield reply
            elif fate == "stranger":
                yield reply._replace(node=7)
            elif fate == "once":
                self.kept.append(reply)
                yield reply


_FATES = st.sampled_from(["once", "twice", "replayed", "stranger", "lost"])
_TABLE = {**table_for("fedavg", rounds=2), "model": {"name": "mlp", "hidden": [4]}}
_TABLE["method"] = {"name": "fedavg", "local_steps": 1}


@example({(number, client): "lost" for number in (1, 2) for client in range(3)})
@given(st.dictionaries(st.tuples(st.integers(1, 2), st.integers(0, 2)), _FATES, max_size=6))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_reply_counts_once_or_not_at_all(plan: Mapping[tuple[int, int], str]) -> None:
    """Whatever the transport does: the result is that of the replies that the records say were counted."""
    if len(plan) == 6 and set(plan.values()) <= {"stranger", "lost", "replayed"}:
        with pytest.raises(RunError, match="every one of the 2 rounds was abandoned"):
            Unreliable(_TABLE, 3, plan=dict(plan)).run(deadline=0.5)
        return
    run = Unreliable(_TABLE, 3, plan=dict(plan)).run(deadline=0.5)
    lost = {record["round"]: {x["client"] for x in record.get("rejections", ())} for record in run.history}
    for (number, client), fate in plan.items():
        assert (client in lost[number]) or fate not in ("stranger", "lost")
    same = Village(_TABLE, 3, fault=lambda client, call, answer: None if client in lost[call.round] else answer)
    assert run.summary["state_sha256"] == same.run(deadline=0.3).summary["state_sha256"]


@pytest.mark.parametrize("named", ["ensemble", "finetuned"])
def test_what_needs_all_data_in_one_place_is_refused(named: str) -> None:
    table = table_for("lg_fedavg", evaluations=["global", "local", named])
    with pytest.raises(ConfigError, match=rf"the evaluation (?i:{named}) needs all clients' data in one place"):
        Village(table, 3).run()


def test_a_newcomer_is_refused() -> None:
    table = {**table_for("fedavg"), "newcomer": {"enabled": True, "rounds": 1, "train": 20, "test": 5}}
    with pytest.raises(ConfigError, match="a newcomer needs all clients' data in one place"):
        Village(table, 4).run()


def saying(**metrics: float) -> Callable[[int, Call, Envelope], Envelope]:
    """Nodes that say this of their training."""

    def forged(client: int, call: Call, answer: Envelope) -> Envelope:
        if call.kind != "train":
            return answer
        said = answer.open(Answer).model_copy(update={"metrics": metrics})
        return Envelope.around(said, answer.frames())

    return forged


NAMES = ("round", "bytes_up", "cohort", "seconds", "global_accuracy", "validation_accuracy", "local_accuracy")


@pytest.mark.parametrize("name", NAMES)
def test_what_a_client_says_has_a_place_of_its_own(name: str) -> None:
    table = table_for("fedavg", rounds=2)
    honest = Village(table, 3).run()
    lying = Village(table, 3, fault=saying(**{name: 0.25})).run()
    assert lying.summary["rejected"] == 0, "what clients say of themselves costs nobody a reply"
    for record, other in zip(lying.history, honest.history, strict=True):
        assert record.clients == {}  # fedavg says that its clients have a train_loss, and no more
        assert (record.round, record.traffic, record.evaluation) == (other.round, other.traffic, other.evaluation)
    unlike = {"seconds", "versions"}
    assert {k: v for k, v in lying.summary.items() if k not in unlike} == {
        k: v for k, v in honest.summary.items() if k not in unlike
    }


@pytest.mark.parametrize(("on", "metric"), [("test", "global_accuracy"), ("validation", "validation_accuracy")])
def test_what_a_client_says_ends_no_phase(on: str, metric: str) -> None:
    table = table_for("lg_fedavg", rounds=3, validation=0.2)
    table["run"]["eval_every"] = 1
    table["method"] |= {"goal": 0.99, "goal_on": on, "fedavg_rounds": 3}
    honest = Village(table, 3).run()
    lying = Village(table, 3, fault=saying(**{metric: 1.0})).run()
    assert honest.summary["global_accuracy"] < 0.99
    assert "goal_round" not in lying.summary
    assert lying.summary["state_sha256"] == honest.summary["state_sha256"]


@pytest.mark.parametrize("name", ["clients/x", "a b", "", "9", "x" * 65])
def test_a_name_that_is_none_costs_the_reply(name: str) -> None:
    (record,) = (
        Village(
            table_for("fedavg", rounds=1),
            3,
            fault=lambda client, call, answer: answer if client else saying(**{name: 0.0})(client, call, answer),
        )
        .run()
        .history
    )
    assert [(x["client"], x["reason"]) for x in record["rejections"]] == [(0, "envelope")]


def private_masks(village: Village, frames: list[bytes]) -> Village:
    """The village, with an ear at the replies of client 0."""

    def ear(client: int, call: Call, answer: Envelope) -> Envelope:
        if client == 0 and call.kind == "train":
            frames.extend(answer.frames())
        return answer

    village.fault = ear
    return village


@pytest.mark.parametrize("private", [True, False])
def test_the_server_cannot_draw_a_private_clients_noise_again(private: bool) -> None:
    """Whoever knows the run's key knows every draw of a simulation: the server of a deployment knows none."""
    table = table_for("fedpm", rounds=1)
    if private:
        table["method"] |= {"privacy": {"c": 0.2, "epsilon": 1.0}}
    heard: list[list[bytes]] = [[], []]
    for frames in heard:
        _built.cache_clear()  # another process
        private_masks(Village(table, 3), frames).run()
    assert len(heard[0]) == len(heard[1]) == 1
    assert (heard[0] != heard[1]) == private
    simulated = experiment_from(table).run()
    assert (simulated.summary.get("privacy_simulated") == 1) == private
    deployed = Village(table, 3).run()
    assert deployed.summary.get("privacy_simulated") == (0 if private else None)
    assert (deployed.summary["state_sha256"] == simulated.summary["state_sha256"]) != private


@pytest.mark.parametrize("total", [-1.0, 1e6, float("nan"), float("inf")])
def test_a_score_that_cannot_be_is_refused(total: float) -> None:
    """More right answers than examples, for one."""

    def boast(client: int, call: Call, answer: Envelope) -> Envelope:
        words = answer.open(Answer)
        if client != 1 or words.kind != "done" or words.examples is None:
            return answer
        sums = {**words.sums, "accuracy": total}
        return Envelope.around(words.model_copy(update={"sums": sums}), answer.frames())

    history = Village(table_for("fedavg", rounds=1, evaluations=["global", "local"]), 3, boast).run().history
    assert [(r["client"], r["reason"]) for r in history[0]["rejections"]] == [(1, "envelope")]
