"""The embedded engine: order, failures, what clients keep, what is counted and what evaluations find."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import laconic.engine.workers as workers_module
from laconic.codecs import Direction, seal, unseal
from laconic.core import (
    ClientInfo,
    ConfigError,
    PayloadError,
    Reply,
    Shared,
    Spec,
    Task,
    Tree,
    Update,
    tree_sha256,
)
from laconic.data import synthetic
from laconic.engine import (
    Agreement,
    LocalUpdate,
    Schedule,
    Simulation,
    client_round,
    evaluate,
    open_reply,
    send,
    server_round,
    to_everyone,
    unpack,
)
from laconic.evaluations import Global, Local
from laconic.methods import fedavg, fedopt
from laconic.methods.em import predictor

Records = list[dict[str, Any]]


def finished(simulation: Simulation) -> tuple[str, Records]:
    """The hash of the final state and the records without their times."""
    records = [{n: v for n, v in record.items() if n != "seconds"} for record in simulation]
    return tree_sha256(simulation.state.server), records


def cohort_of(simulation: Simulation, round: int) -> list[int]:
    return simulation.population.cohort_of(simulation.agreement.round_key(round), round=round)


def only(clients: set[int], act: Callable[[], object]) -> Callable[[ClientInfo], None]:
    def before(client: ClientInfo) -> None:
        if client.id in clients:
            act()

    return before


def fail() -> None:
    raise ValueError("no power")


# --- determinism and order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["plain", "optimizer", "personal", "residuals", "changes"])
def test_workers_do_not_matter(toys: Any, case: str) -> None:
    """Same state, same metrics for any number of workers and for two runs."""
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "optimizer": {"method": fedopt()},
        "personal": {"method": toys.remembering()},
        "residuals": {"up": "ef(topk:fraction=0.2)"},
        "changes": {"up": "eden:bits=2", "down": "eden:bits=4"},
    }
    counts = (0, 0, 1, 2, 3) if case == "plain" else (0, 3)
    runs = [finished(toys.simulation(rounds=4, cohort=7, workers=w, **cases[case])) for w in counts]
    assert all(run == runs[0] for run in runs[1:])
    assert [record["replies"] for record in runs[0][1]] == [7, 7, 7, 7]
    assert finished(toys.simulation(rounds=4, cohort=7, seed=1, **cases[case]))[0] != runs[0][0]


def test_replies_are_folded_in_client_order_whatever_the_order_of_arrival(toys: Any) -> None:
    folded: list[int] = []

    def watched(replies: Iterable[Reply]) -> Iterator[Reply]:
        for reply in replies:
            folded.append(reply.client.id)
            yield reply

    def late_first(client: ClientInfo) -> None:
        time.sleep(0.004 * (toys.clients - client.id))

    reference = finished(toys.simulation(rounds=2, cohort=8))
    simulation = toys.simulation(toys.hooked(before=late_first, replies=watched), rounds=2, cohort=8, workers=3)
    assert finished(simulation)[0] == reference[0]
    assert folded == cohort_of(simulation, 1) + cohort_of(simulation, 2)
    assert folded[:8] == sorted(folded[:8])


def test_global_generators_are_left_alone_and_do_not_matter(toys: Any) -> None:
    task = Task(lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3)))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = finished(toys.simulation(task=task))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert finished(toys.simulation(task=task)) == one


# --- failures ----------------------------------------------------------------------------------------------------


def test_a_client_that_raises_costs_its_reply(toys: Any) -> None:
    simulation = toys.simulation(rounds=1)
    bad = cohort_of(simulation, 1)[2]
    for workers in (1, 2):
        _, records = finished(toys.simulation(toys.hooked(before=only({bad}, fail)), rounds=1, workers=workers))
        assert (records[0]["replies"], records[0]["rejected"]) == (5, 1)
        assert records[0]["rejections"] == [
            {"client": bad, "round": 1, "reason": "client_error", "detail": "ValueError: no power"}
        ]


def test_without_workers_a_clients_own_exception_ends_the_run_and_says_where_it_was(toys: Any) -> None:
    bad = cohort_of(toys.simulation(), 2)[0]
    first = next(number for number in (1, 2) if bad in cohort_of(toys.simulation(), number))
    with pytest.raises(ValueError, match=r"^no power") as caught:
        finished(toys.simulation(toys.hooked(before=only({bad}, fail))))
    assert caught.value.__notes__ == [f"(client {bad}, round {first}, in client_update)"]
    assert caught.traceback[-1].name == "fail", "the traceback leads to the client's own line"


def explode(*_: object, **__: object) -> Any:
    return 1 / 0


class Broken:
    """A codec of somebody's own."""

    text, id = "broken", 1

    def init_state(self, spec: Spec) -> Tree:
        return {}

    def encode(self, tree: Tree, shared: Shared, state: Tree) -> tuple[bytes, Tree]:
        return explode()

    def decode(self, blob: bytes, spec: Spec, shared: Shared) -> Tree:
        return {}


@pytest.mark.parametrize("stage", ["client_update", "evaluate", "encode", "init_client", "its data"])
def test_the_note_names_the_stage(toys: Any, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """Whatever the function is called that a method gives."""
    fields = {"client_update": explode} if stage == "client_update" else {"init_client": explode}
    method = toys.hooked()
    if stage in ("client_update", "init_client"):
        method = replace(method, bind=lambda task, population: replace(toys.hooked().bind(task, population), **fields))
    metrics = {"mine": explode} if stage == "evaluate" else {}
    task = Task(partial(nn.Linear, 5, 3), metrics=metrics)
    simulation = toys.simulation(method, task=task, up="signsgd", evaluations=[Local()])
    if stage == "encode":
        agreement = simulation.agreement
        simulation.agreement = replace(agreement, link=replace(agreement.link, up=Broken()))
    if stage == "its data":
        monkeypatch.setattr(type(simulation.clients), "client", explode)
    with pytest.raises(ZeroDivisionError) as caught:
        finished(simulation)
    assert caught.value.__notes__ == [f"(client {cohort_of(simulation, 1)[0]}, round 1, in {stage})"]


def test_a_payload_error_is_a_rejection_with_and_without_workers(toys: Any) -> None:
    def refuse(client: ClientInfo) -> None:
        if client.id % 2:
            raise PayloadError("no_power", "the battery is empty")

    runs = [finished(toys.simulation(toys.hooked(before=refuse), workers=workers)) for workers in (0, 2)]
    assert runs[0] == runs[1]
    said = {(r["reason"], r["detail"]) for record in runs[0][1] for r in record["rejections"]}
    assert said == {("no_power", "the battery is empty")}


@pytest.mark.parametrize("act", [lambda: sys.exit(3), lambda: 1 / 0, lambda: [].pop()])
def test_whatever_a_client_does_the_round_goes_on(toys: Any, act: Callable[[], object]) -> None:
    bad = cohort_of(toys.simulation(), 1)[0]
    runs = [
        finished(toys.simulation(toys.hooked(before=only({bad}, act)), rounds=1, workers=workers)) for workers in (1, 2)
    ]
    assert runs[0] == runs[1]
    assert runs[0][1][0]["replies"] == 5


def test_an_error_is_told_in_one_line_of_bounded_length(toys: Any) -> None:
    def babble(client: ClientInfo) -> None:
        raise ValueError("a\nb " * 10_000)

    _, records = finished(toys.simulation(toys.hooked(before=babble), rounds=1, workers=1))
    detail = records[0]["rejections"][0]["detail"]
    assert detail.startswith("ValueError: a b a b")
    assert len(detail) < 600


def without(toys: Any, clients: set[int], **schedule: Any) -> tuple[str, Records]:
    """The run in which these clients never answer."""
    return finished(toys.simulation(toys.hooked(before=only(clients, fail)), workers=1, **schedule))


def spoil_message(value: float) -> Callable[[ClientInfo, Update], Update]:
    def after(client: ClientInfo, update: Update) -> Update:
        if client.id % 3:
            return update
        message = {name: leaf.clone() for name, leaf in update.message.items()}
        message["bias"][-1] = value
        return replace(update, message=message)

    return after


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_client_that_sends_nan_is_as_good_as_none(toys: Any, value: float, workers: int) -> None:
    state, records = finished(toys.simulation(toys.hooked(after=spoil_message(value)), workers=workers))
    expected, others = without(toys, {0, 3, 6, 9})
    assert state == expected
    for record, other in zip(records, others, strict=True):
        assert {r["reason"] for r in record.pop("rejections")} == {"non_finite"}
        other.pop("rejections")
        assert record == other


def altered(alter: Callable[[Agreement, bytes], bytes]) -> Callable[..., LocalUpdate]:
    """`client_round` of clients that alter the frame after everything else: what no codec of ours would send."""

    def update(agreement: Agreement, received: Any, client: ClientInfo, *rest: Any, **more: Any) -> LocalUpdate:
        update = client_round(agreement, received, client, *rest, **more)
        return update if client.id % 3 else replace(update, frame=alter(agreement, update.frame))

    return update


def lie(agreement: Agreement, frame: bytes, payload: bytes | None = None, **changes: Any) -> bytes:
    header, honest = unseal(
        frame,
        direction=Direction.UP,
        codec=agreement.link.up.id,
        round=int.from_bytes(frame[8:12], "little"),
        client=int.from_bytes(frame[12:16], "little"),
        fingerprint=agreement.fingerprint,
    )
    return seal(replace(header, **changes), honest if payload is None else payload)


def nan_inside(agreement: Agreement, frame: bytes) -> bytes:
    return lie(agreement, frame, frame[40:-4] + torch.tensor([math.nan]).numpy().tobytes())


BAD_FRAMES: dict[str, tuple[str, Callable[[Agreement, bytes], bytes]]] = {
    "cut": ("truncated", lambda _, frame: frame[:-3]),
    "empty": ("truncated", lambda _, frame: b""),
    "longer": ("trailing", lambda _, frame: frame + b"\0"),
    "one bit": ("checksum", lambda _, frame: frame[:50] + bytes([frame[50] ^ 4]) + frame[51:]),
    "noise": ("magic", lambda _, frame: bytes(range(64))),
    "weight zero": ("weight", lambda agreement, frame: lie(agreement, frame, weight=0)),
    "weight huge": ("weight", lambda agreement, frame: lie(agreement, frame, weight=2**32 - 1)),
    "other round": ("round", lambda agreement, frame: lie(agreement, frame, round=77)),
    "other client": ("client", lambda agreement, frame: lie(agreement, frame, client=1)),
    "other run": ("fingerprint", lambda agreement, frame: lie(agreement, frame, fingerprint=b"12345678")),
    "nan": ("non_finite", nan_inside),
    "short payload": ("truncated", lambda agreement, frame: lie(agreement, frame, frame[40:-4])),
}


@pytest.mark.parametrize("case", BAD_FRAMES)
def test_a_bad_frame_costs_one_reply_and_is_counted(toys: Any, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    reason, alter = BAD_FRAMES[case]
    monkeypatch.setattr(workers_module, "client_round", altered(alter))
    workers = 2 if case in ("cut", "nan") else 0
    simulation = toys.simulation(workers=workers)
    state, records = finished(simulation)
    expected, _ = without(toys, {0, 3, 6, 9})
    assert state == expected
    for record in records:
        bad = [client for client in cohort_of(simulation, record["round"]) if client % 3 == 0]
        said = [(r["client"], r["round"], r["reason"]) for r in record.get("rejections", [])]
        assert said == [(client, record["round"], reason) for client in bad]
        assert (record["rejected"], record["replies"]) == (len(bad), 6 - len(bad))
        # Refused or not, the bytes came: they count.
        length = len(alter(simulation.agreement, honest_frame(simulation, record["round"], bad[0]))) if bad else 0
        assert record["bytes_up"] == (6 - len(bad)) * (40 + 4 * 18) + len(bad) * length


def honest_frame(simulation: Simulation, round: int, client: int) -> bytes:
    received = send(simulation.agreement, simulation.state.server, to_everyone(round))[1].received
    data = simulation.clients.client(client)
    return client_round(simulation.agreement, received, ClientInfo(client, round, 0), {}, {}, data).frame


def test_fewer_replies_than_needed_abandon_the_round(toys: Any) -> None:
    def fail_in_second(client: ClientInfo) -> None:
        if client.round == 2 and client.id % 2:
            raise ValueError("gone")

    method = toys.remembering(before=fail_in_second)
    simulation = toys.simulation(method, rounds=3, min_replies=6, up="ef(signsgd)", workers=1)
    hashes, kept, records = [], [], []
    for record in simulation:
        state = simulation.state
        hashes.append(tree_sha256(state.server))
        kept.append((dict(state.personal), dict(state.codec)))
        records.append(record)
    assert hashes[0] == hashes[1] != hashes[2]
    assert kept[0] == kept[1] != kept[2]
    assert records[1]["abandoned"] == f"{records[1]['replies']} replies accepted, 6 needed"
    assert "abandoned" not in records[0]
    assert "abandoned" not in records[2]
    assert records[1]["bytes_down"] == records[0]["bytes_down"]
    assert simulation.state.round == 3


def test_a_round_in_which_nobody_answers_is_abandoned(toys: Any) -> None:
    simulation = toys.simulation(toys.hooked(before=lambda client: fail()), rounds=2, workers=1)
    before = tree_sha256(simulation.state.server)
    state, records = finished(simulation)
    assert state == before
    assert [record["abandoned"] for record in records] == ["no reply was accepted"] * 2
    assert records[0]["rejected"] == 6
    assert not any(name.startswith("clients/") for name in records[0])
    assert records[1]["local_clients"] == 0


def test_a_server_state_that_would_not_be_finite_abandons_the_round(toys: Any) -> None:
    def huge(client: ClientInfo, update: Update) -> Update:
        return replace(update, message={n: torch.full_like(v, 3e38) for n, v in update.message.items()})

    simulation = toys.simulation(toys.hooked(after=huge), rounds=1)
    simulation.agreement = replace(simulation.agreement, max_value=math.inf)
    before = tree_sha256(simulation.state.server)
    state, records = finished(simulation)
    assert state == before
    assert records[0]["abandoned"] == "the server's state would not be finite"


def test_a_huge_value_costs_its_sender_only(toys: Any) -> None:
    def huge(client: ClientInfo, update: Update) -> Update:
        if client.id % 3:
            return update
        return replace(update, message={n: torch.full_like(v, 3e38) for n, v in update.message.items()})

    def gone(client: ClientInfo) -> None:
        if client.id % 3 == 0:
            raise ConnectionError("gone")

    state, records = finished(toys.simulation(toys.hooked(after=huge), rounds=3))
    assert {rejection["reason"] for record in records for rejection in record["rejections"]} == {"huge"}
    assert state == finished(toys.simulation(toys.hooked(before=gone), rounds=3, workers=1))[0]


def test_a_third_of_the_clients_vanishes_in_every_round(toys: Any) -> None:
    """The survivors are averaged, exactly: each round equals the mean over those who answered."""

    def vanish(client: ClientInfo) -> None:
        if (client.id + client.round) % 3 == 0:
            raise ConnectionError("gone")

    simulation = toys.simulation(toys.hooked(before=vanish), rounds=30, eval_every=30, workers=1)
    honest = toys.simulation(rounds=30)
    agreement = honest.agreement
    server = honest.state.server
    for record in simulation:
        number = record["round"]
        received = send(agreement, server, to_everyone(number))[1].received
        infos = [ClientInfo(c, number, 0) for c in cohort_of(honest, number) if (c + number) % 3]
        updates = {i: client_round(agreement, received, i, {}, {}, honest.clients.client(i.id)) for i in infos}
        server = server_round(
            agreement,
            server,
            (open_reply(agreement, update.frame, received, i) for i, update in updates.items()),
            number,
        )
        assert tree_sha256(simulation.state.server) == tree_sha256(server)
        assert record["replies"] == len(infos)


# --- what clients keep -------------------------------------------------------------------------------------------


def test_personal_and_codec_state_stay_with_accepted_replies(toys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose reply is refused keeps what it had: it does not know that it was refused."""
    monkeypatch.setattr(workers_module, "client_round", altered(lambda _, frame: frame[:-1]))
    simulation = toys.simulation(toys.remembering(), rounds=5, up="ef(topk:fraction=0.2)")
    accepted: dict[int, int] = {}
    for record in simulation:
        for client in cohort_of(simulation, record["round"]):
            if client % 3:
                accepted[client] = accepted.get(client, 0) + 1
    state = simulation.state
    assert {client: int(unpack(packed)["updates"]) for client, packed in state.personal.items()} == accepted
    assert set(state.codec) == set(accepted)
    assert max(accepted.values()) > 1
    assert set(state.local) == set(accepted)


def test_residuals_are_what_the_codec_lost(toys: Any) -> None:
    """With error feedback: all that was to be sent = all that was applied + what remains."""
    wanted: dict[int, dict[str, torch.Tensor]] = {}
    applied: dict[int, dict[str, torch.Tensor]] = {}

    def note(client: ClientInfo, update: Update) -> Update:
        seen = wanted.setdefault(client.id, {n: torch.zeros_like(v) for n, v in update.message.items()})
        wanted[client.id] = {n: seen[n] + v for n, v in update.message.items()}
        return update

    def noting(replies: Iterable[Reply]) -> Iterator[Reply]:
        for reply in replies:
            seen = applied.setdefault(reply.client.id, {n: torch.zeros_like(v) for n, v in reply.message.items()})
            applied[reply.client.id] = {n: seen[n] + v for n, v in reply.message.items()}
            yield reply

    simulation = toys.simulation(toys.hooked(after=note, replies=noting), rounds=6, cohort=8, up="ef(signsgd)")
    finished(simulation)
    assert set(wanted) == set(simulation.state.codec)
    for client, packed in simulation.state.codec.items():
        residual = unpack(packed)
        for name, total in wanted[client].items():
            assert torch.allclose(applied[client][name] + residual[name], total, atol=1e-5)


def test_a_client_without_data_makes_no_update(toys: Any) -> None:
    data = toys.federation()
    empty = replace(data, train_rows=type(data.train_rows).from_lists([[], *list(data.train_rows)[1:]]))
    _, records = finished(toys.simulation(data=empty, rounds=1, cohort=12))
    assert [(r["client"], r["reason"]) for r in records[0]["rejections"]] == [(0, "no_data")]
    assert records[0]["replies"] == 11


# --- what is counted ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_the_ledger_is_the_sum_of_frame_lengths(toys: Any, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    simulate_module: Any = import_module("laconic.engine.simulate")  # the package has a function of that name
    down_module: Any = import_module("laconic.engine.way_down")
    up: list[int] = []
    down: list[int] = []
    opened, sent = simulate_module.open_reply, down_module.send

    def counting_open(agreement: Any, frame: bytes, *rest: Any) -> Any:
        up.append(len(frame))
        return opened(agreement, frame, *rest)

    def counting_send(*args: Any) -> Any:
        frame, received = sent(*args)
        down.append(len(frame))
        return frame, received

    monkeypatch.setattr(simulate_module, "open_reply", counting_open)
    monkeypatch.setattr(down_module, "send", counting_send)
    simulation = toys.simulation(rounds=4, up="topk:fraction=0.3", down="float16", workers=workers)
    _, records = finished(simulation)
    ledger = simulation.state.ledger
    assert (len(up), len(down)) == (24, 4)
    assert ledger.bytes_up == sum(up) == sum(record["bytes_up"] for record in records)
    assert ledger.bytes_down == 6 * sum(down) == sum(record["bytes_down"] for record in records)
    assert (ledger.messages_up, ledger.messages_down) == (24, 24)
    assert [record["bytes_down"] for record in records] == [6 * (40 + 2 * 18)] * 4
    assert ledger.paper_bytes == 24 * 4 * (18 + 18)


def test_a_client_that_sends_nothing_costs_its_broadcast_only(toys: Any) -> None:
    bad = cohort_of(toys.simulation(), 1)[0]
    simulation = toys.simulation(toys.hooked(before=only({bad}, fail)), rounds=1, workers=1)
    finished(simulation)
    ledger = simulation.state.ledger
    assert (ledger.messages_up, ledger.messages_down) == (5, 6)
    assert ledger.bytes_up == 5 * (40 + 4 * 18)
    assert ledger.paper_bytes == 5 * 4 * (18 + 18)


# --- evaluation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_global_figures_are_those_of_the_server_on_the_common_test_set(toys: Any, workers: int) -> None:
    simulation = toys.simulation(rounds=3, workers=workers)
    for record in simulation:
        model = simulation.method.global_model(simulation.state.server)
        x, y = simulation.clients.test.tensors()
        with torch.no_grad():
            output = model(x)
        assert record["global_loss"] == pytest.approx(float(F.cross_entropy(output, y)), rel=1e-5)
        assert record["global_accuracy"] == pytest.approx(float((output.argmax(1) == y).double().mean()))


def test_local_figures_are_means_over_clients_of_their_last_model_on_their_own_data(toys: Any) -> None:
    last: dict[int, dict[str, float]] = {}

    def note(client: ClientInfo, update: Update) -> Update:
        assert update.fitted is not None
        part = data.client(client.id).test
        last[client.id] = evaluate(task, update.fitted, part).means()
        return update

    data, task = toys.federation(), Task(partial(nn.Linear, 5, 3))
    simulation = toys.simulation(toys.hooked(after=note), task=task, data=data, rounds=5, cohort=3)
    seen = set()
    for record in simulation:
        seen |= set(cohort_of(simulation, record["round"]))
        assert set(last) == seen
        assert record["local_clients"] == len(last)
        for name in ("accuracy", "loss"):
            mean = sum(figures[name] for figures in last.values()) / len(last)
            assert record[f"local_{name}"] == pytest.approx(mean)
    assert 3 < len(seen) <= toys.clients


def test_local_figures_say_how_they_are_spread_over_clients(toys: Any) -> None:
    simulation = toys.simulation(rounds=4, cohort=11)
    records = list(simulation)
    values = sorted(score.means()["accuracy"] for score in simulation.state.local.values())
    assert len(values) > 10
    last = records[-1]
    assert last["local_accuracy_worst_decile"] == pytest.approx((values[0] + values[1]) / 2)  # a tenth, rounded up
    assert (last["local_accuracy_p0"], last["local_accuracy_p100"]) == (values[0], values[-1])
    assert last["local_accuracy_p50"] == pytest.approx(float(np.median(values)))
    assert last["local_accuracy_p10"] == pytest.approx(float(np.quantile(values, 0.1)))


def test_without_accuracy_the_worst_tenth_is_that_of_the_largest_loss(toys: Any) -> None:
    data = synthetic(clients=8, features=4, train_examples=20, test_examples=10, noise=0.1)
    task = Task(partial(nn.Linear, 4, 1), loss=F.mse_loss, metrics={}, outputs="values")
    _, records = finished(toys.simulation(fedavg(), data=data, task=task, rounds=2, cohort=8))
    last = records[-1]
    assert last["local_loss_worst_decile"] == last["local_loss_p100"] > last["local_loss_p0"]


def test_clients_with_personal_state_are_evaluated_with_their_own_predictor(toys: Any) -> None:
    simulation = toys.simulation(toys.remembering(), rounds=3, cohort=4, workers=2)
    for record in simulation:
        task, state = simulation.method.task, simulation.state
        figures = []
        for client, packed in state.personal.items():
            own = {n.removeprefix("own/"): v for n, v in unpack(packed).items() if n.startswith("own/")}
            figures.append(evaluate(task, predictor(task, own), simulation.clients.client(client).test).means())
        assert record["local_clients"] == len(figures)
        assert record["local_accuracy"] == pytest.approx(sum(f["accuracy"] for f in figures) / len(figures))


def test_clients_without_test_data_are_not_evaluated(toys: Any) -> None:
    data = toys.federation()
    blind = replace(data, test_rows=type(data.test_rows).from_lists([[], [], *list(data.test_rows)[2:]]))
    _, records = finished(toys.simulation(data=blind, rounds=1, cohort=12))
    assert (records[0]["replies"], records[0]["local_clients"]) == (12, 10)


def test_local_evaluation_can_be_left_out(toys: Any) -> None:
    simulation = toys.simulation(evaluations=[Global()])
    state, records = finished(simulation)
    assert state == finished(toys.simulation())[0]
    assert not any(name.startswith("local_") for name in records[-1])
    assert "global_accuracy" in records[-1]
    assert simulation.state.local == {}, "no client evaluates what it has fitted"


def test_evaluations_come_every_so_many_rounds_and_at_the_end(toys: Any) -> None:
    _, records = finished(toys.simulation(rounds=8, eval_every=3))
    assert [record["round"] for record in records if "global_loss" in record] == [3, 6, 8]
    assert [record["round"] for record in records if "local_clients" in record] == [3, 6, 8]


@pytest.mark.parametrize("workers", [0, 2])
def test_regression_reports_a_loss_and_no_accuracy(toys: Any, workers: int) -> None:
    data = synthetic(clients=8, features=4, train_examples=20, test_examples=10, noise=0.1)
    task = Task(partial(nn.Linear, 4, 1), loss=F.mse_loss, metrics={}, outputs="values")
    simulation = toys.simulation(fedavg(), data=data, task=task, rounds=5, workers=workers)
    _, records = finished(simulation)
    assert "global_accuracy" not in records[-1]
    assert "local_accuracy" not in records[-1]
    assert records[-1]["global_loss"] < records[0]["global_loss"] < 2
    x, y = data.test.tensors()
    with torch.no_grad():
        direct = F.mse_loss(simulation.method.global_model(simulation.state.server)(x), y)
    assert records[-1]["global_loss"] == pytest.approx(float(direct), rel=1e-5)


def test_a_users_own_loss_and_metrics(toys: Any) -> None:
    def margin(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.multi_margin_loss(output, target)

    def sure(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output.softmax(1).amax(1) > 0.5).float()

    task = Task(partial(nn.Linear, 5, 3), loss=margin, metrics={"sure": sure})
    simulation = toys.simulation(task=task, workers=2)
    state, records = finished(simulation)
    assert state != finished(toys.simulation())[0], "it trains with the loss given"
    assert {n for n in records[-1] if n.startswith(("global_", "local_"))} == {
        *("global_loss", "global_sure", "local_loss", "local_sure", "local_clients")
    }
    x, y = simulation.clients.test.tensors()
    with torch.no_grad():
        output = simulation.method.global_model(simulation.state.server)(x)
    assert records[-1]["global_loss"] == pytest.approx(float(margin(output, y)), rel=1e-5)
    assert records[-1]["global_sure"] == pytest.approx(float(sure(output, y).mean()))


def test_records_have_the_names_that_were_promised(toys: Any) -> None:
    records = list(toys.simulation(eval_every=2))
    plain = {"round", "cohort", "replies", "rejected", "bytes_up", "bytes_down", "seconds"}
    evaluated = {"global_accuracy", "global_loss", "local_accuracy", "local_clients"}
    assert plain <= set(records[0])
    assert not evaluated & set(records[0])
    assert plain | evaluated <= set(records[1])
    assert all(record["seconds"] > 0 and record["cohort"] == 6 for record in records)


# --- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rounds", "cohort", "eval_every", "min_replies"])
def test_counts_are_at_least_one(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"run\.{name} must be at least 1, got 0"):
        Schedule(**{name: 0})


def test_impossible_schedules_are_refused(toys: Any) -> None:
    with pytest.raises(ConfigError, match=r"run\.min_replies \(5\) is larger than run\.cohort \(4\)"):
        Schedule(cohort=4, min_replies=5)
    with pytest.raises(ConfigError, match=r"run\.workers must be 'auto' or not negative, got -1"):
        toys.simulation(workers=-1)
    with pytest.raises(ConfigError, match=r"run\.store.*'tape'"):
        toys.simulation(store="tape")
    with pytest.raises(ConfigError, match=r"run\.cohort is 13, but there are only 12 clients"):
        toys.simulation(cohort=13)
