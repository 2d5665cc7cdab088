"""Codecs on the link: both ways, any number of workers, kept states, honest counts."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic as lc
from laconic.codecs import parse
from laconic.codecs.measure import SHOWN
from laconic.codecs.wire import HEADER_BYTES
from laconic.core import (
    ALONE,
    Bound,
    ClientData,
    ClientInfo,
    ConfigError,
    Key,
    Method,
    PayloadError,
    Population,
    Reply,
    Task,
    Tree,
    Update,
    sample_cohort,
    spec_of,
)
from laconic.engine import (
    Agreement,
    Link,
    Schedule,
    Simulation,
    receive,
    send,
    to_everyone,
    unpack,
)
from laconic.experiment import RunSettings, experiment, make_task, simulate

simulate_module = sys.modules["laconic.engine.simulate"]
FEEDBACK = ("ef(signsgd)", "ef(topk:fraction=0.05)", "ef(eden:bits=1)")
LOSSY = tuple(text for text in SHOWN if text not in ("float32", "float16", "bfloat16"))


def federation(clients: int = 6) -> lc.Federation:
    return lc.data.digits(clients=clients, partition={"kind": "dirichlet", "alpha": 1.0}, limit=300)


def run(up: str, down: str, *, workers: int = 0, rounds: int = 3, cohort: int = 4, **settings: Any) -> lc.Run:
    return lc.fit(
        method=lc.fedavg(solver=lc.Solver(lr=0.05, local_epochs=1)),
        data=federation(),
        rounds=rounds,
        cohort=cohort,
        up=up,
        down=down,
        workers=workers,
        evaluations=["global"],
        **settings,
    )


def ready(down: str) -> Simulation:
    return experiment(data=federation(), up="float32", down=down, run=RunSettings(cohort=2, seed=3)).simulation


@pytest.mark.parametrize("codec", [*SHOWN, *FEEDBACK])
def test_workers_do_not_matter_with_any_codec(codec: str) -> None:
    down = "float32" if codec.startswith("ef(") else codec
    alone, together = run(codec, down), run(codec, down, workers=2)
    assert alone.summary["state_sha256"] == together.summary["state_sha256"]
    for name in ("bytes_up", "bytes_down"):
        assert [record[name] for record in alone.history] == [record[name] for record in together.history]


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedopt", "fedmedian", "fedensemble"])
@pytest.mark.parametrize("codec", ["eden:bits=4", "int8"])
def test_every_method_runs_with_a_lossy_link(method: str, codec: str) -> None:
    result = lc.fit(method=method, data=federation(), rounds=2, cohort=3, up=codec, down=codec, workers=0)
    assert result.summary["rejected"] == 0
    assert result.summary["bits_per_parameter_up"] < 9


@pytest.mark.parametrize("codec", LOSSY)
def test_clients_train_from_what_the_server_knows(codec: str) -> None:
    """The server's replica and a client's, built from the frames alone, are the same bits."""
    simulation = ready(codec)
    agreement, server = simulation.agreement, simulation.state.server
    assert agreement.remembers
    known = replica = agreement.first_held()
    for number in range(1, 4):
        server = {name: leaf + 0.01 * torch.sin(number + leaf) for name, leaf in server.items()}
        frame, (_, known) = send(agreement, server, to_everyone(number), known)
        replica = receive(agreement, frame, to_everyone(number), replica).held
        assert all(torch.equal(known[name], replica[name]) for name in known)


def test_what_is_lost_on_the_way_down_is_sent_later() -> None:
    """With a server that stands still, what clients know converges to the server's weights."""
    simulation = ready("eden:bits=2")
    agreement = simulation.agreement
    target = {name: leaf + 1 for name, leaf in simulation.state.server.items()}
    known = agreement.first_held()
    gaps = []
    for number in range(1, 9):
        _, (_, known) = send(agreement, target, to_everyone(number), known)
        gaps.append(sum(float((known[name] - target[f"w/{name}"]).square().sum()) for name in known))
    assert all(later < 0.3 * earlier for earlier, later in itertools.pairwise(gaps))


def test_missed_frames_are_counted() -> None:
    cohort = 2
    result = run("float32", "drive", rounds=6, cohort=cohort, down_memory="shared")
    parameters = result.summary["parameters"]
    whole = HEADER_BYTES + 4 * parameters
    least = HEADER_BYTES + parameters // 8
    first, *down = [record["bytes_down"] for record in result.history]
    assert first < cohort * (HEADER_BYTES + 16)  # everybody knows the initial weights
    assert all(cohort * least <= num_bytes <= cohort * whole for num_bytes in down)
    assert down[0] < 1.5 * cohort * least  # nobody has missed anything of substance
    assert max(down) > 1.5 * cohort * least  # later, frames that were missed are sent as well


def test_error_feedback_is_refused_on_the_way_down() -> None:
    with pytest.raises(ConfigError, match=r"link\.down"):
        run("float32", "ef(signsgd)")


class StopAfterThree:
    """An observer that interrupts a run."""

    def started(self, *, rounds: int, history: Sequence[Mapping[str, Any]]) -> None: ...

    def advanced(self, record: Mapping[str, Any]) -> None:
        if record["round"] == 3:
            raise KeyboardInterrupt

    def finished(self, summary: Mapping[str, Any]) -> None: ...


@pytest.mark.parametrize("codec", FEEDBACK)
def test_residuals_and_replicas_survive_a_resume(codec: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounds": 6, "out": tmp_path, "checkpoint_every": 2}
    whole = run(codec, "eden:bits=2", name="whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        run(codec, "eden:bits=2", name="cut", observer=StopAfterThree(), **settings)
    resumed = run(codec, "eden:bits=2", name="cut", resume=True, **settings)
    for figure in ("state_sha256", "bytes_up", "bytes_down"):
        assert resumed.summary[figure] == whole.summary[figure]


def truth(client: int, round: int) -> Tree:
    return {"sum": torch.randn(200, generator=Key.from_seed(7).fold_in(client, round).torch())}


def drift() -> Method:
    """A method whose true updates are known beforehand: the server's state is the sum of what was applied."""

    def bind(task: Task, population: Population = ALONE) -> Bound:
        def init(key: Key) -> Tree:
            return {"sum": torch.zeros(200)}

        def update(received: Tree, personal: Tree, data: ClientData, client: ClientInfo, key: Key) -> Update:
            message = truth(client.id, client.round)
            if (client.id, client.round) == NOT_FINITE:
                message["sum"] = message["sum"] * torch.nan
            return Update(message)

        def add(server: Tree, replies: Iterable[Reply], key: Key) -> Tree:
            total = server["sum"].clone()
            for reply in replies:
                total += reply.message["sum"]
            return {"sum": total}

        return Bound(
            task=task,
            init=init,
            broadcast=lambda server, client, key: dict(server),
            broadcast_spec=lambda client, key: spec_of(init(key)),
            client_update=update,
            message_spec=spec_of,
            server_update=add,
            global_model=lambda server: task.fresh(),
        )

    return Method("drift", {}, bind)


NOT_FINITE, ALTERED = (1, 3), (2, 4)
"""(client, round) of a reply that is not finite, and of one that the server refuses."""


@pytest.mark.parametrize("codec", FEEDBACK)
def test_applied_and_residual_add_up_to_the_true_updates(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = simulate_module.open_reply

    def open_reply(agreement: Agreement, frame: bytes, received: Tree, client: ClientInfo) -> Reply:
        if (client.id, client.round) == ALTERED:
            raise PayloadError("checksum", "altered on its way")
        return genuine(agreement, frame, received, client)

    monkeypatch.setattr(simulate_module, "open_reply", open_reply)
    data = federation()
    schedule = Schedule(rounds=8, cohort=5, eval_every=8)
    link = Link(parse(codec), parse("float32"))
    simulation = Simulation(drift(), make_task(data, "mlp"), data, link, schedule, seed=0, workers=0)
    wanted, refused = torch.zeros(200), set()
    for record in simulation:
        number = record["round"]
        out = {rejection["client"] for rejection in record.get("rejections", ())}
        refused |= {(client, number) for client in out}
        for client in sample_cohort(simulation.agreement.round_key(number), clients=6, cohort=5):
            if client not in out:
                wanted += truth(client, number)["sum"]
    residual = torch.stack([unpack(packed)["sum"] for packed in simulation.state.codec.values()]).sum(dim=0)
    assert refused == {NOT_FINITE, ALTERED}
    torch.testing.assert_close(simulation.state.server["sum"] + residual, wanted, rtol=0, atol=1e-4)


def test_plain_loop_takes_codecs() -> None:
    data = federation()
    records = simulate(
        lc.fedavg(), data, task=make_task(data, "mlp"), up=parse("drive"), down=parse("float32"), rounds=2, cohort=2
    )
    assert [record["round"] for record in records] == [1, 2]


def test_majority_vote_costs_one_bit_both_ways() -> None:
    result = run("signsgd_mv:step=0.01", "signsgd_mv:step=0.01", rounds=3, cohort=6)
    parameters = result.summary["parameters"]
    one_bit = HEADER_BYTES + -(-parameters // 8) + 16
    assert result.summary["bytes_up"] <= 3 * 6 * one_bit
    assert result.summary["bytes_down"] <= 3 * 6 * one_bit


def test_majority_vote_moves_clients_by_the_majority() -> None:
    """With votes of ±step and no residual yet, what clients know moves by step × the sign of the votes' sum."""
    simulation = ready("signsgd_mv:step=0.01")
    agreement, server = simulation.agreement, simulation.state.server
    known = agreement.first_held()
    votes = {
        name: torch.randn(3, *leaf.shape, generator=Key.from_seed(5).torch()).sign() for name, leaf in known.items()
    }
    server = {f"w/{name}": known[name] + 0.01 * vote.mean(dim=0) for name, vote in votes.items()}
    _, (moved, _) = send(agreement, server, to_everyone(1), known)
    for name, vote in votes.items():
        torch.testing.assert_close(moved[name] - known[name], 0.01 * vote.sum(dim=0).sign(), rtol=0, atol=1e-6)


class Normed(torch.nn.Module):
    """Batch normalisation, and a layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Linear(64, 16).requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(16)
        self.head = torch.nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.frozen(x.flatten(1)))))


@pytest.mark.parametrize("method", ["fedavg", "fedopt", "fedmedian", "fedensemble"])
@pytest.mark.parametrize("codec", ["drive", "signsgd", "topk:fraction=0.05"])
def test_what_is_not_trained_passes_codecs_as_it_is(method: str, codec: str) -> None:
    data = federation()
    result = lc.fit(
        method=method,
        data=data,
        model=Normed,
        rounds=8,
        cohort=4,
        up=codec,
        down=codec,
        workers=0,
        evaluations=["global"],
    )
    state = result.model.state_dict()
    variances = [leaf for name, leaf in state.items() if name.endswith("running_var")]
    assert all(bool((leaf > 0).all()) for leaf in variances)
    first = make_task(data, Normed).init(Key.from_seed(0).fold_in("init"))
    prefix = "members.0." if method == "fedensemble" else ""
    assert torch.equal(state[f"{prefix}frozen.weight"], first["frozen.weight"])
    assert not torch.equal(state[f"{prefix}head.weight"], first["head.weight"])


def test_frozen_parameters_do_not_travel_up() -> None:
    result = lc.fit(data=federation(), model=Normed, rounds=1, cohort=2, workers=0)
    moving = 16 * 10 + 10 + 4 * 16
    assert result.summary["bytes_up"] == 2 * (HEADER_BYTES + 4 * moving)


def test_given_first_weights_cost_their_first_contact() -> None:
    """What comes from the run's key is known to all; what was given is sent to everyone by the codec's own means."""
    given = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    settings: dict[str, Any] = {"data": federation(), "rounds": 2, "cohort": 6, "down": "eden:bits=4", "workers": 0}
    one, other = lc.fit(model=given, **settings), lc.fit(model="logistic", **settings)
    bits = 8 * (HEADER_BYTES + one.summary["parameters"])
    for result in (one, other):
        for record in result.history:
            assert 8 * record["bytes_down"] < 6 * bits
    assert one.history[0]["bytes_down"] > 5 * other.history[0]["bytes_down"]


@pytest.mark.parametrize("down", ["mask", "mask | eden:bits=4", "mask | float16", "int8", "topk:fraction=0.01"])
def test_counts_go_down_by_any_codec_and_come_as_they_are(down: str) -> None:
    """`mask` codes them; the others are made for values, of which there are none."""
    states = {
        lc.fit(method="fedpm", data=federation(), rounds=2, cohort=2, down=way, workers=0).summary["state_sha256"]
        for way in (down, "float32")
    }
    assert len(states) == 1


def test_what_follows_mask_decides_what_goes_down() -> None:
    """Bits and counts by themselves are given as they are; values after it go as changes unless they go whole."""
    assert ready("mask | drive").agreement.remembers
    assert not ready("mask").agreement.remembers
    assert not ready("mask | float16").agreement.remembers


def test_a_link_that_is_left_out_is_the_methods_own() -> None:
    settings: dict[str, Any] = {"data": federation(), "rounds": 1, "cohort": 2, "workers": 0}
    summary = lc.fit(method="fedpm", **settings).summary
    assert (summary["up"], summary["down"]) == ("mask", "mask")
    summary = lc.fit(method="fedpm", up="float32", **settings).summary
    assert (summary["up"], summary["down"]) == ("float32", "mask")
    summary = lc.fit(**settings).summary
    assert (summary["up"], summary["down"]) == ("float32", "float32")


def test_codec_objects_serve_as_well_as_their_text() -> None:
    settings: dict[str, Any] = {"data": federation(), "rounds": 2, "cohort": 2, "workers": 0}
    text = lc.fit(up="topk:fraction=0.1 | eden:bits=4", **settings)
    made = lc.fit(up=lc.codecs.topk(0.1) | lc.codecs.eden(4), **settings)
    assert text.summary["state_sha256"] == made.summary["state_sha256"]
