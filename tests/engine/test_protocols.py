"""How models are tested: the ensemble of all devices, a device that joins later, and what representations give away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

from laconic.codecs import parse
from laconic.codecs.wire import HEADER_BYTES
from laconic.config import experiment_from, read_table
from laconic.core import ClientData, ClientInfo, ConfigError, DataError, Key, Part, Task, accuracy
from laconic.data import Federation, digits, with_rotated_client
from laconic.engine import Link, Newcomer, Schedule, Simulation, probe, roc_auc, unpack
from laconic.methods import KeepLocal, Solver, fedavg, local_only, mtl
from laconic.testing import small_federation, small_task

SOLVER = Solver(lr=0.1, local_epochs=1, batch_size=4)


def simulation(method: Any, data: Federation | None = None, task: Task | None = None, **schedule: Any) -> Simulation:
    link = Link(parse("float32"), parse("float32"))
    settings = {"rounds": 2, "cohort": 4, "workers": 0, "eval_every": 1, **schedule}
    return Simulation(method, task or small_task(), data or small_federation(), link, Schedule(**settings), seed=0)


def last(run: Simulation) -> dict[str, Any]:
    *_, record = run
    return record


# --- the new test ----------------------------------------------------------------------------------------------------


def test_the_ensemble_is_the_mean_of_all_devices_outputs() -> None:
    run = simulation(KeepLocal(fedavg(solver=SOLVER), ("0.*",)), rounds=3, new_test=True)
    record = last(run)
    x, y = run.clients.test.tensors()
    outputs = []
    for client in range(6):
        received = run.method.broadcast(run.state.server, ClientInfo(client, 3, 0), Key.from_seed(0))
        model = run.method.local_model(received, unpack(run.state.personal.get(client, b"")))
        with torch.no_grad():
            outputs.append(model(x).double())
    mean = torch.stack(outputs).mean(dim=0).float()
    assert record["new_accuracy"] == pytest.approx(float(accuracy(mean, y).mean()))
    votes = torch.stack([output.argmax(dim=1) for output in outputs]).mode(dim=0)
    agreed = (torch.stack([output.argmax(dim=1) for output in outputs]) == votes.values).sum(dim=0) > 3
    majority = (votes.values == y)[agreed].float().sum()
    assert record["vote_accuracy"] * len(y) >= float(majority) - 1e-6
    assert record["new_test_models"] == 6
    # The one upload: the private part of every device that has one, in float32.
    assert record["new_test_bytes_up"] == len(run.state.personal) * (HEADER_BYTES + 4 * 30)


def test_it_is_made_once_and_not_counted_among_the_rounds() -> None:
    method = KeepLocal(fedavg(solver=SOLVER), ("0.*",))
    run, without = simulation(method, new_test=True), simulation(method)
    records = list(run)
    assert ["new_accuracy" in record for record in records] == [False, True]
    list(without)
    assert run.state.ledger == without.state.ledger


def test_identical_devices_are_one_model() -> None:
    """§9.5 (h)."""
    slow = KeepLocal(fedavg(solver=Solver(lr=1e-12, local_epochs=1)), ("0.*",))
    record = last(simulation(slow, new_test=True, cohort=6))
    assert record["new_accuracy"] == record["vote_accuracy"] == record["global_accuracy"]
    assert record["new_loss"] == pytest.approx(record["global_loss"], abs=1e-5)


def test_without_models_of_their_own_it_is_the_servers_model() -> None:
    record = last(simulation(fedavg(solver=SOLVER), new_test=True))
    assert record["new_accuracy"] == record["global_accuracy"]
    assert record["new_test_bytes_up"] == 0


@pytest.mark.parametrize("method", [local_only(solver=SOLVER), mtl(solver=SOLVER)])
def test_baselines_have_it_too(method: Any) -> None:
    record = last(simulation(method, new_test=True, cohort=6))
    assert 0 <= record["new_accuracy"] <= 1
    assert record["new_test_bytes_up"] == 6 * (HEADER_BYTES + 4 * 51)


def test_the_number_of_workers_does_not_matter_to_it() -> None:
    method = KeepLocal(fedavg(solver=SOLVER), ("0.*",))
    alone, two = (last(simulation(method, new_test=True, workers=workers)) for workers in (0, 2))
    assert {**alone, "seconds": 0} == {**two, "seconds": 0}


# --- a device that joins later ---------------------------------------------------------------------------------------


def test_a_newcomer_sits_out_and_then_is_always_there() -> None:
    newcomer = Newcomer(after=3, others=2)
    rounds = [newcomer.cohort(Key.from_seed(number), round=number, clients=8, cohort=3) for number in range(1, 9)]
    assert all(len(cohort) == 3 and 7 not in cohort for cohort in rounds[:3])
    assert all(len(cohort) == 3 and cohort[-1] == 7 for cohort in rounds[3:])
    assert len({tuple(cohort) for cohort in rounds}) > 4
    with pytest.raises(ConfigError, match="must not be negative"):
        Newcomer(after=-1)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ({"cohort": 6, "newcomer": Newcomer(1)}, "run.cohort is 6, but there are only 5 clients"),
        ({"newcomer": Newcomer(1, others=6)}, "run.newcomer.others is 6, but there are only 5 others"),
    ],
)
def test_there_must_be_clients_enough(schedule: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        simulation(fedavg(), **schedule)


def test_with_nobody_else_only_the_newcomer_moves_the_server() -> None:
    run = simulation(fedavg(solver=SOLVER), rounds=4, newcomer=Newcomer(after=2, others=0))
    records = list(run)
    assert [record["cohort"] for record in records] == [4, 4, 1, 1]
    assert all("newcomer_accuracy" in record for record in records)


def test_private_leaves_of_the_others_stay_while_a_newcomer_trains() -> None:
    method = KeepLocal(fedavg(solver=SOLVER), ("0.*",), warmup_epochs=2, warmup_after=2)
    run = simulation(method, rounds=5, newcomer=Newcomer(after=2, others=0))
    stream = iter(run)
    next(stream)
    next(stream)
    before = dict(run.state.personal)
    rest = list(stream)
    after = dict(run.state.personal)
    assert after.keys() - before.keys() == {5}
    assert all(after[client] == packed for client, packed in before.items())
    assert rest[-1]["local_clients"] == 5  # the newcomer has a figure of its own


def test_turned_images() -> None:
    plain = digits(clients=4)
    more = with_rotated_client(plain, train=60, test=30, seed=3)
    assert more.num_clients == 5
    assert [more.examples(c) for c in range(4)] == [plain.examples(c) for c in range(4)]
    assert torch.equal(more.common, plain.common)
    new = more.client(4)
    assert (len(new.train), len(new.test)) == (60, 30)
    x, y = new.train.tensors()
    back = torch.rot90(x, -1, (2, 3))
    known = {(image.numpy().tobytes(), int(label)) for image, label in zip(*plain.train.tensors(), strict=True)}
    assert all(
        (image.contiguous().numpy().tobytes(), int(label)) in known for image, label in zip(back, y, strict=True)
    )
    # Counter-clockwise: what was on the right is on top.
    assert torch.equal(x[0, 0, 0], back[0, 0, :, -1])
    for settings, said in (({"train": 10**6}, "1 to"), ({"test": 0}, "1 to")):
        with pytest.raises(DataError, match=said):
            with_rotated_client(plain, **settings)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="only images can be turned"):
        with_rotated_client(small_federation())


NEW_DEVICE = """
[run]
rounds = 2
cohort = 2
workers = 0

[data]
source = "digits"
clients = 4

[method]
name = "{method}"
local_epochs = 1

[new_device]
rounds = 3
fraction = 0.5
train = 60
test = 30
"""


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "lg_fedavg"])
def test_the_section_of_a_new_device(tmp_path: Path, method: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(NEW_DEVICE.format(method=method))
    assert experiment_from(read_table(path)).simulation.clients.num_clients == 4  # it must be asked for
    made = experiment_from(read_table(path, ["new_device.enabled=true"]))
    schedule = made.simulation.schedule
    assert (schedule.rounds, schedule.newcomer) == (5, Newcomer(after=2, others=2))
    assert made.config["new_device"]["warmup_epochs"] == 5
    run = made.run()
    assert run.summary["newcomer_accuracy"] is not None
    assert [record["cohort"] for record in run.history] == [2, 2, 3, 3, 3]


def test_the_flag_of_a_new_device(tmp_path: Path, laconic: Any) -> None:
    path = tmp_path / "run.toml"
    path.write_text(NEW_DEVICE.format(method="fedavg"))
    said = laconic("run", path, "--new-device", "--out", tmp_path)
    assert said.code == 0, said.err
    assert "new device" in said.out
    written = tmp_path / "run" / "config.toml"
    assert "enabled = true" in written.read_text()
    again = experiment_from(read_table(written)).simulation  # the file says all
    assert (again.schedule.rounds, again.clients.num_clients) == (5, 5)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("new_device.fraktion=0.5", r"\[new_device\]: unknown key 'fraktion'; did you mean 'fraction'\?"),
        ("new_device.fraction=2.0", r"new_device.fraction must lie in \[0, 1\], got 2.0"),
        ("new_device.turns=4", "new_device.turns must be 1, 2 or 3 quarter turns, got 4"),
        ("new_device.rounds=0", "new_device.rounds must be at least 1, got 0"),
    ],
)
def test_mistakes_about_a_new_device(tmp_path: Path, override: str, said: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(NEW_DEVICE.format(method="fedavg"))
    with pytest.raises(ConfigError, match=said):
        experiment_from(read_table(path, [override]))


# --- what representations give away ----------------------------------------------------------------------------------


def marked(seed: int = 0, examples: int = 400) -> Federation:
    """Two attributes: one that is the sign of an input, one that has nothing to do with the inputs."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((examples, 4)).astype(np.float32)
    marks = np.stack([x[:, 0] > 0, rng.random(examples) > 0.5], axis=1).astype(np.float32)
    return Federation.from_arrays(
        (x, (x[:, 1] > 0).astype(np.int64)), clients=2, protected=marks, partition="iid", classes=2
    )


def test_a_fresh_adversary_finds_what_is_there() -> None:
    data = marked()
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(4))
        net[0].bias.zero_()
    client = data.client(0)
    test = Part(data.x, data.y, data.common, data.protected)
    found = probe(net, "0", ClientData(client.train, test), Key.from_seed(0))
    assert found["posthoc_auc_0"] > 0.9
    assert 0.3 < found["posthoc_auc_1"] < 0.7
    with torch.no_grad():
        net[0].weight[0].zero_()  # the attribute's input is not in the representation any more
    blind = probe(net, "0", ClientData(client.train, test), Key.from_seed(0))
    assert blind["posthoc_auc_0"] < 0.7


def test_a_probe_needs_protected_attributes() -> None:
    with pytest.raises(DataError, match=r"run\.probe needs protected attributes"):
        list(simulation(fedavg(solver=SOLVER), probe="0"))


def test_areas_under_curves() -> None:
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 8, 200).astype(np.float32), rng.random(200) > 0.6
    ours = roc_auc(torch.from_numpy(scores), torch.from_numpy(labels))
    assert ours == pytest.approx(roc_auc_score(labels, scores))
    assert np.isnan(roc_auc(torch.zeros(3), torch.tensor([True, True, True])))
