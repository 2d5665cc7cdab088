"""What nodes hold of the way down: both ends agree on it, and whatever becomes of it costs bytes and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.flower.conftest import Village, reference, table_for

from laconic.config import experiment_from
from laconic.engine import Silent
from laconic.flower.messages import Answer, Call, Envelope

FEW = {"up": "ef(eden:bits=2)", "down": "eden:bits=2"}
BOTH_WAYS: dict[str, dict[str, Any]] = {
    "fedavg": FEW,
    "fedsparse": {"up": "eden:bits=2", "down": "eden:bits=2"},
    "feddrop": {"up": "float32", "down": "topk:fraction=0.1"},
    "lg_fedavg": FEW,
    "mtl": FEW,
}


def table(name: str = "fedavg", *, rounds: int = 6, **link: Any) -> dict[str, Any]:
    return {
        **table_for(name if name != "fedavg" else "eden", rounds=rounds, cohort=2),
        "link": {**BOTH_WAYS[name], **link},
    }


def held(entries: dict[str, bytes]) -> list[str]:
    return sorted(name for name in entries if name.startswith("held."))


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_the_result_is_that_of_the_embedded_engine(name: str) -> None:
    embedded, deployed = experiment_from(table(name)).run(), Village(table(name), 3).run()
    assert deployed.summary["state_sha256"] == embedded.summary["state_sha256"]
    for ours, theirs in zip(embedded.history, deployed.history, strict=True):
        for figure in ("bytes_up", "bytes_down", "replies"):
            assert ours[figure] == theirs[figure]
        assert ours.get("staleness") == theirs.get("staleness")


def emptied(entries: dict[str, bytes]) -> None:
    for name in held(entries):
        del entries[name]


def flipped(entries: dict[str, bytes]) -> None:
    for name in held(entries):
        damaged = bytearray(entries[name])
        damaged[-3] ^= 1
        entries[name] = bytes(damaged)


def cut(entries: dict[str, bytes]) -> None:
    for name in held(entries):
        entries[name] = entries[name][:-5]


def older(entries: dict[str, bytes]) -> None:
    """What an old disk has: the tree of an earlier round under the name of this one."""
    first, *_, last = held(entries)
    entries[last] = entries[first]


@pytest.mark.parametrize("harm", [emptied, flipped, cut, older])
def test_a_node_that_holds_something_else_is_sent_anew(harm: Callable[[dict[str, bytes]], None]) -> None:
    village = Village(table(rounds=8), 3)
    harmed: list[int] = []

    def fault(client: int, call: Call, answer: Envelope) -> Envelope:
        if client == 1 and call.kind == "train" and len(held(village.entries[1])) > 1 and not harmed:
            harmed.append(call.round)
            harm(village.entries[1])
        return answer

    village.fault = fault
    run, honest = village.run(), Village(table(rounds=8), 3).run()
    assert harmed
    assert run.summary["rejected"] == 0
    assert run.summary["bytes_down"] > honest.summary["bytes_down"]
    anew = [call for call in village.calls if call.client == 1 and call.kind == "train" and call.round > harmed[0]]
    assert anew[0].held not in ("", None)
    assert anew[1].held == ""
    assert anew[0].round == anew[1].round, "in the same round"


def test_a_foreign_memory_is_noticed() -> None:
    """The files of another client, or of another run, have other names or other contents."""
    village = Village(table(rounds=8), 3)

    def fault(client: int, call: Call, answer: Envelope) -> Envelope:
        if call.kind == "train" and call.round == 4:
            other = village.entries.get((client + 1) % 3, {})
            emptied(village.entries[client])
            village.entries[client].update({name: other[name] for name in held(other)})
        return answer

    village.fault = fault
    run = village.run()
    assert run.summary["rejected"] == 0
    assert sum(call.held == "" and call.round > 4 for call in village.calls if call.kind == "train") >= 2


def test_a_reply_that_is_lost_leaves_what_both_ends_agree_on() -> None:
    """The node took the frame in, the server does not know: the next frame builds on what it held before."""
    lost = {2: {0, 1, 2}, 4: {1}, 5: {0}}

    def fault(client: int, call: Call, answer: Envelope) -> Envelope | None:
        return None if client in lost.get(call.round, ()) else answer

    village = Village(table(rounds=8), 3, fault=fault)
    run = village.run(deadline=0.4)
    assert run.summary["state_sha256"] == reference(table(rounds=8), run.history).summary["state_sha256"]
    assert all(call.held != "" or call.round <= 3 for call in village.calls if call.kind == "train")


def test_a_client_that_says_it_holds_something_else_costs_its_reply() -> None:
    def fault(client: int, call: Call, answer: Envelope) -> Envelope:
        if client == 2 and call.kind == "train":
            said = answer.open(Answer).model_copy(update={"held": "1." + "0" * 32})
            return Envelope.around(said, answer.frames())
        return answer

    run = Village(table(rounds=6), 3, fault=fault).run()
    assert set(run.summary["rejected_for"]) == {"held"}
    assert {x["client"] for record in run.history for x in record.get("rejections", ())} == {2}


def test_a_server_that_goes_on_finds_what_its_nodes_held(tmp_path: Path) -> None:
    class Interrupted(Silent):
        def advanced(self, record: Any) -> None:
            if record["round"] == 4:
                raise RuntimeError("killed")

    village = Village(table(), 3)
    with pytest.raises(RuntimeError, match="killed"):
        village.run(out=tmp_path, observer=Interrupted())
    village = Village(table(), 3, entries=village.entries)
    run = village.run(out=tmp_path, resume=True)
    assert run.summary["state_sha256"] == experiment_from(table()).run().summary["state_sha256"]
    assert all(call.held for call in village.calls if call.kind == "train" and call.round > 5)


def test_nodes_do_not_pile_up_what_they_held() -> None:
    village = Village(table(rounds=12), 3)
    village.run()
    assert all(len(held(entries)) <= 3 for entries in village.entries.values())
