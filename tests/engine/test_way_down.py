"""What clients hold of the way down: one frame for a contact, whatever was missed, and both ends agree on it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.methods.conftest import small_federation, small_task

import laconic as lc
from laconic.codecs import parse
from laconic.codecs.feedback import Contraction
from laconic.codecs.measure import SHOWN
from laconic.codecs.wire import HEADER_BYTES
from laconic.core import (
    ClientInfo,
    Codec,
    ConfigError,
    Key,
    PayloadError,
    Shared,
    Tree,
    spec_of,
    subtree,
    traits_of,
    tree_sha256,
)
from laconic.engine import Link, Schedule, Simulation, receive, send, unpack
from laconic.engine.downlink import Memories
from laconic.experiment import RunSettings, experiment
from laconic.methods import methods

LOSSY = [text for text in SHOWN if not traits_of(parse(text)).dense]
WITH_VALUES = [name for name in methods if name not in ("fedpm", "fedmask", "vardrop", "local_only")]


def federation(clients: int = 8) -> lc.Federation:
    return lc.data.digits(clients=clients, partition={"kind": "dirichlet", "alpha": 1.0}, limit=400)


def run(**given: Any) -> lc.Run:
    usual: dict[str, Any] = {
        "method": lc.fedavg(lr=0.05, local_epochs=1),
        "data": federation(),
        "rounds": 4,
        "cohort": 3,
        "up": "eden:bits=2",
        "down": "eden:bits=2",
        "workers": 0,
        "evaluations": ["global"],
    }
    return lc.fit(**{**usual, **given})


def simulation(method: str = "fedavg", down: str = "eden:bits=2", **link: Any) -> Simulation:
    both = Link(parse("float32"), parse(down), **link)
    schedule = Schedule(rounds=4, cohort=3, eval_every=4)
    return Simulation(methods.build(method, {}), small_task(), small_federation(clients=4), both, schedule, seed=3)


# --- both ends agree --------------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(LOSSY), st.lists(st.sets(st.integers(0, 3)), min_size=1, max_size=6))
def test_whoever_comes_back_decodes_what_the_server_believes(codec: str, pattern: list[set[int]]) -> None:
    """Any codec, any pattern of who takes part when: from frames alone, a client has the server's very bits."""
    agreement = simulation(down=codec).agreement
    server = agreement.method.init(agreement.key.fold_in("init"))
    believed = {client: agreement.first_held() for client in range(4)}
    devices = dict(believed)
    for number, cohort in enumerate(pattern, start=1):
        server = {name: leaf + 0.05 * torch.sin(number + leaf) for name, leaf in server.items()}
        for client in sorted(cohort):
            info = ClientInfo(client, number, 0)
            frame, (received, believed[client]) = send(agreement, server, info, believed[client])
            got, devices[client] = receive(agreement, frame, info, devices[client])
            assert tree_sha256(got) == tree_sha256(received)
            assert tree_sha256(devices[client]) == tree_sha256(believed[client])


@pytest.mark.parametrize("name", WITH_VALUES)
def test_every_method_sends_changes_and_both_ends_agree(name: str) -> None:
    """In every round of a real run: what the server derives from what a client holds is what that client received."""
    whole = simulation(name)
    agreement, devices = whole.agreement, {client: whole.agreement.first_held() for client in range(4)}
    assert agreement.remembers
    for record in whole:
        state, number = whole.state, record["round"]
        assert state.memories is not None
        assert record["rejected"] == 0
        for client in [c for c, contact in state.memories.contacts.items() if contact.round == number]:
            assert tree_sha256(unpack(state.memories.of(client))) != tree_sha256(devices[client]) or number == 1
            devices[client] = unpack(state.memories.of(client))
            info = ClientInfo(client, number + 1, 0)
            tree = agreement.broadcast(state.server, info)
            frame, (received, held) = send(agreement, state.server, info, devices[client])
            got = receive(agreement, frame, info, devices[client])
            derived = agreement.received_of(tree, info, held)
            assert list(derived) == list(received) == list(got.received)
            assert tree_sha256(derived) == tree_sha256(received) == tree_sha256(got.received)
            assert tree_sha256(got.held) == tree_sha256(held)


def test_a_contact_costs_one_frame_whatever_was_missed() -> None:
    result = run(rounds=8, cohort=2)
    parameters = result.summary["parameters"]
    frame = HEADER_BYTES + parameters // 4 + 64
    assert all(record["bytes_down"] <= 2 * frame for record in result.history)
    assert result.summary["bits_per_parameter_down"] < 2.2
    shared = run(rounds=8, cohort=2, down_memory="shared")
    assert shared.summary["bytes_down"] > 1.5 * result.summary["bytes_down"]


def test_records_say_what_went_down_and_how_stale_clients_were() -> None:
    first, *later = run(rounds=5, cohort=3).history
    assert first["bytes_down_first"] == first["bytes_down"]
    assert "staleness" not in first
    assert all(record["bytes_down_first"] <= record["bytes_down"] for record in later if "bytes_down_first" in record)
    assert any(record["staleness"] > 1 for record in later if "staleness" in record)
    everyone = run(rounds=3, cohort=8).history
    assert [record.get("staleness") for record in everyone] == [None, 1.0, 1.0]


# --- which memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "settings", "memory"),
    [
        ("fedavg", {"cohort": 4}, "shared"),
        ("fedavg", {"cohort": 3}, "client"),
        ("feddrop", {"cohort": 4}, "client"),
        ("fedavg", {"cohort": 4, "down_memory": "client"}, "client"),
        ("fedavg", {"cohort": 3, "down_memory": "shared"}, "shared"),
        ("fedavg", {"cohort": 3, "down": "float32"}, None),
        ("fedpm", {"cohort": 3, "down": "mask"}, "client"),
        ("fedpm", {"cohort": 3, "down": "float32"}, None),
    ],
)
def test_the_engine_takes_the_cheaper_memory(method: str, settings: dict[str, Any], memory: str | None) -> None:
    given = {"down": "eden:bits=2", **settings}
    cohort = RunSettings(cohort=given.pop("cohort"))
    made = experiment(data=federation(4), method=method, run=cohort, **given).simulation.state
    assert (made.downlink is not None, made.memories is not None) == (memory == "shared", memory == "client")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"down_memory": "both"}, "unknown link.down_memory 'both'"),
        ({"memory": -1}, "link.memory must not be negative, got -1"),
        ({"memory": "much"}, "link.memory must be bytes or a size such as '20 MB' or '1 GiB', got 'much'"),
        ({"method": "feddrop", "down_memory": "shared"}, "feddrop sends each client a broadcast of its own"),
        ({"method": "vardrop", "cohort": 8, "down_memory": "client"}, "clients of vardrop hold replicas"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(**given)


def test_both_memories_lead_to_the_same_where_nothing_is_lost() -> None:
    """`topk:fraction=1` is exact: whoever remembers, clients train from the same weights."""
    settings: dict[str, Any] = {"down": "topk:fraction=1.0", "rounds": 3, "eval_every": 1}
    one, other = run(**settings, down_memory="client"), run(**settings, down_memory="shared")
    for record, same in zip(one.history, other.history, strict=True):
        assert record["global_accuracy"] == same["global_accuracy"]


# --- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["memory", "disk"])
@pytest.mark.parametrize("memory", [0, 30_000, "1 GiB"])
def test_what_does_not_fit_is_forgotten_and_everything_goes_on(store: str, memory: int | str) -> None:
    result = run(rounds=6, store=store, memory=memory)
    assert result.summary["rejected"] == 0
    again = sum(record.get("bytes_down_first", 0) > 0 for record in result.history)
    assert again == 6 if memory == 0 else again >= 2


def test_the_longest_unseen_is_forgotten_first() -> None:
    memories = Memories(budget=30)
    for number, client in enumerate([4, 2, 7, 4, 9], start=1):
        memories.keep(client, number, memories.store.stage(client, bytes(10)), 10)
    assert list(memories.contacts) == [7, 4, 9]
    assert sorted(memories.store) == [4, 7, 9]
    assert memories.held_bytes == 30
    assert (memories.missed(4, 6), memories.missed(2, 6)) == (2, None)


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedsparse", "feddrop", "lg_fedavg", "fedpm"])
def test_workers_kills_and_stores_do_not_matter(method: str, tmp_path: Path) -> None:
    down = "mask" if method == "fedpm" else "eden:bits=2"
    settings: dict[str, Any] = {"method": method, "up": "float32" if method != "fedpm" else "mask", "down": down}
    whole = run(**settings)

    class Stop:
        def started(self, **_: Any) -> None: ...

        def advanced(self, record: Any) -> None:
            if record["round"] == 2:
                raise KeyboardInterrupt

        def finished(self, summary: Any) -> None: ...

    with pytest.raises(KeyboardInterrupt):
        run(**settings, workers=2, out=tmp_path, store="disk", observer=Stop())
    resumed = run(**settings, workers=2, out=tmp_path, resume=True, store="memory")
    for figure in ("state_sha256", "bytes_up", "bytes_down"):
        assert resumed.summary[figure] == whole.summary[figure]


def test_a_client_that_fails_after_its_frame_holds_what_it_was_sent() -> None:
    """A refused reply costs the reply: the server believes what the client has, and the next frame builds on it."""

    class Fails(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                raise RuntimeError("out of luck")
            return self.layer(x.flatten(1))

    settings = RunSettings(rounds=1, cohort=2, workers=1, evaluations=())
    made = experiment(data=federation(4), model=Fails, down="eden:bits=2", run=settings).simulation
    (record,) = list(made)
    assert record["rejected"] == 2
    assert made.state.memories is not None
    assert len(made.state.memories.contacts) == 2
    assert record["bytes_down"] > 0


# --- contraction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", LOSSY)
def test_a_memory_never_drifts_away_from_a_server_that_stands_still(codec: str) -> None:
    """With the noise of an unbiased codec it would: half a bit of EDEN has twice the energy of what is sent."""
    agreement = simulation(down=codec).agreement
    server = agreement.method.init(agreement.key.fold_in("init"))
    target = {name: leaf + 1 for name, leaf in server.items()}
    held, gaps = agreement.first_held(), []
    for number in range(1, 13):
        info = ClientInfo(0, number, 0)
        _, (_, held) = send(agreement, target, info, held)
        wanted = agreement.broadcast(target, info)
        gaps.append(sum(float((held[name] - wanted[name]).square().sum()) for name in wanted))
    if not traits_of(parse(codec)).literal:
        assert all(later <= earlier * 1.0001 for earlier, later in itertools.pairwise(gaps))


def test_noise_that_is_larger_than_what_is_sent_is_scaled_to_least_squares() -> None:
    codec: Codec = Contraction(parse("eden:bits=0.5"))
    tree: Tree = {"w": torch.randn(3000, generator=Key.from_seed(1).torch()), "steps": torch.tensor([7])}
    shared = Shared(Key.from_seed(2))
    blob, _ = codec.encode(tree, shared, {})
    found = codec.decode(blob, spec_of(tree), shared)
    plain = parse("eden:bits=0.5").decode(blob[4:], spec_of(tree), shared)
    assert torch.equal(found["steps"], tree["steps"])
    assert float((tree["w"] - found["w"]).square().sum()) < float(tree["w"].square().sum())
    assert float((tree["w"] - plain["w"]).square().sum()) > float(tree["w"].square().sum())
    assert abs(float((tree["w"] - found["w"]) @ found["w"])) < 1e-3 * float(found["w"].square().sum())


def test_noise_that_is_smaller_is_left_unbiased() -> None:
    codec: Codec = Contraction(parse("eden:bits=1"))
    tree: Tree = {"w": torch.randn(3000, generator=Key.from_seed(1).torch())}
    blob, _ = codec.encode(tree, Shared(Key.from_seed(2)), {})
    assert blob[:4] == b"\0\0\x80\x3f"


@pytest.mark.parametrize("blob", [b"", b"\0\0\x80", b"\0\0\xc0\x7f" + bytes(50), b"\0\0\x80\x7f" + bytes(50)])
def test_a_scale_that_is_none_is_refused(blob: bytes) -> None:
    with pytest.raises(PayloadError):
        Contraction(parse("drive")).decode(blob, spec_of({"w": torch.zeros(8)}), Shared(Key.from_seed(0)))


def test_where_first_weights_were_given_nobody_holds_them() -> None:
    given = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    settings = RunSettings(cohort=2)
    made = experiment(data=federation(4), model=given, down="eden:bits=2", run=settings).simulation
    assert all(not leaf.any() for leaf in made.agreement.first_held().values())
    assert any(leaf.any() for leaf in subtree("w", made.state.server).values())
