"""What runs measure: five evaluations, those of one's own, and a client that joins later."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

import laconic as lc
from laconic.codecs import parse
from laconic.codecs.wire import HEADER_BYTES
from laconic.config import experiment_from, read_table
from laconic.core import (
    ClientData,
    ClientInfo,
    ConfigError,
    DataError,
    Key,
    Method,
    Newcomer,
    Part,
    Population,
    RunError,
    Task,
    accuracy,
    tree_sha256,
)
from laconic.data import Federation, digits, with_rotated_client
from laconic.engine import Evaluation, Link, Record, Schedule, Simulation, evaluate, unpack
from laconic.engine.workers import Pool
from laconic.evaluations import (
    Ensemble,
    FineTuned,
    Global,
    Local,
    Probe,
    evaluation_of,
    evaluations,
    probe,
    roc_auc,
)
from laconic.experiment import RunSettings, experiment, make_task
from laconic.methods import KeepLocal, Solver, fedavg, lg_fedavg, local_only, methods, mtl
from laconic.testing import small_federation, small_task

SOLVER = Solver(lr=0.1, local_epochs=1, batch_size=4)


ALL = (Global(), Local(), Ensemble())


def simulation(
    method: Method,
    data: Federation | None = None,
    task: Task | None = None,
    *,
    evaluations: Sequence[Evaluation] = (Global(), Local()),
    workers: int = 0,
    **schedule: Any,
) -> Simulation:
    link = Link(parse("float32"), parse("float32"))
    settings = {"rounds": 2, "cohort": 4, "eval_every": 1, **schedule}
    return Simulation(
        method,
        task or small_task(),
        data or small_federation(),
        link,
        Schedule(**settings),
        seed=0,
        evaluations=evaluations,
        workers=workers,
    )


def last(run: Simulation) -> Record:
    *_, record = run
    return record


# --- which there are -------------------------------------------------------------------------------------------------


def test_an_evaluation_is_named_or_given_as_a_table_or_as_an_object() -> None:
    assert [evaluation_of(name) for name in ("global", "local", "ensemble", "finetuned")] == [
        *(Global(), Local(), Ensemble(), FineTuned(epochs=5, lr=0.05, batch_size=10))
    ]
    assert evaluation_of({"name": "probe", "layer": "fc1"}) == Probe(layer="fc1")
    assert evaluation_of({"name": "finetuned", "epochs": 2, "lr": 0.1}) == FineTuned(epochs=2, lr=0.1)
    mine = FineTuned(epochs=7)
    assert evaluation_of(mine) is mine
    assert list(evaluations) == ["global", "local", "ensemble", "finetuned", "probe"]


MISTAKES: dict[str, tuple[Any, str]] = {
    "a wrong name": ("ensembel", "unknown evaluation 'ensembel'; did you mean 'ensemble'?"),
    "no name": ({"layer": "fc1"}, "run.evaluations: {'layer': 'fc1'} needs a name; known: global, local, ensemble"),
    "no layer": ("probe", "[run.evaluations] probe: the key 'layer' is required."),
    "a wrong key": (
        {"name": "finetuned", "epoch": 3},
        "[run.evaluations] finetuned: unknown key 'epoch'; did you mean 'epochs'?",
    ),
    "a wrong type": (
        {"name": "finetuned", "epochs": "3"},
        "[run.evaluations] finetuned: epochs: should be a valid integer, got '3'.",
    ),
    "no evaluation": (3, "run.evaluations: 3 is no evaluation; known: global"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_about_an_evaluation_is_one_sentence_before_anything_runs(case: str) -> None:
    wrong, said = MISTAKES[case]
    for attempt in (
        lambda: evaluation_of(wrong),
        lambda: RunSettings(evaluations=("global", wrong)),
        lambda: lc.fit(data=digits(clients=2), evaluations=["global", wrong], rounds=1, cohort=1, workers=0),
    ):
        with pytest.raises(ConfigError) as caught:
            attempt()
        assert str(caught.value).startswith(said)
        assert "\n" not in str(caught.value)


def test_evaluations_are_a_list() -> None:
    with pytest.raises(ConfigError, match=r"^run\.evaluations must be a list, got 'global'\.$"):
        lc.fit(data=digits(clients=2), evaluations="global", rounds=1, cohort=1, workers=0)


EVALUATED = """
[run]
rounds = 2
cohort = 2
workers = 0
evaluations = ["global", "ensemble", { name = "finetuned", epochs = 1 }]

[data]
source = "digits"
clients = 3
limit = 90

[method]
local_epochs = 1
"""


def test_a_file_names_evaluations_and_gives_tables(tmp_path: Path, laconic: Any) -> None:
    path = tmp_path / "run.toml"
    path.write_text(EVALUATED)
    said = laconic("run", path, "--out", tmp_path)
    assert said.code == 0, said.err
    made = experiment_from(read_table(tmp_path / "run" / "config.toml"))  # what was written says the same
    assert made.simulation.evaluations == (Global(), Ensemble(), FineTuned(epochs=1))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert {"global_accuracy", "new_accuracy", "finetuned_accuracy"} <= summary.keys()
    assert summary["local_accuracy"] is None, "nobody asked for it"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ('["globl"]', "unknown evaluation 'globl'; did you mean 'global'?"),
        ('[{ name = "probe" }]', "[run.evaluations] probe: the key 'layer' is required."),
        ('"global"', "[run]: evaluations: should be a valid array, got 'global'."),
    ],
)
def test_a_files_mistake_about_evaluations_is_one_sentence_and_code_2(
    tmp_path: Path, laconic: Any, value: str, said: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(EVALUATED)
    found = laconic("run", path, "--out", tmp_path, "--set", f"run.evaluations={value}")
    assert found.code == 2
    assert found.err.split() == f"error: {said}".split()
    assert not (tmp_path / "run").exists()


@dataclass(frozen=True)
class Norm:
    """An evaluation of one's own: what it finds may build on what was found before."""

    at_end: bool = False
    fitted: ClassVar[bool] = False

    def metrics(self, run: Simulation, pool: Pool, found: Mapping[str, Any]) -> dict[str, Any]:
        norm = sum(float(leaf.square().sum()) for leaf in run.state.server.values())
        return {"norm": norm, "seen": sorted(found)[0]} if self.at_end else {"norm": norm}


def test_an_evaluation_of_ones_own_writes_into_the_records(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"data": digits(clients=3, limit=90), "rounds": 4, "cohort": 2, "workers": 0}
    run = lc.fit(evaluations=["global", Norm()], eval_every=2, **settings, out=tmp_path)
    assert ["norm" in record for record in run.history] == [False, True, False, True]
    assert run.summary["norm"] == run.history[-1].evaluation["norm"] > 0
    assert "Norm(at_end=False)" in (tmp_path / "run" / "config.toml").read_text()
    ending = lc.fit(evaluations=[Norm(at_end=True), "global"], eval_every=2, **settings)
    assert ["norm" in record for record in ending.history] == [False, False, False, True]
    assert ending.summary["seen"] == "global_accuracy", "those at the end come after all others"
    with pytest.raises(RunError, match=r"cannot resume .*: run\.evaluations was "):
        lc.fit(evaluations=["global", Norm(at_end=True)], eval_every=2, **settings, out=tmp_path, resume=True)


def test_no_evaluation_at_all_leaves_the_traffic_and_what_clients_say() -> None:
    run = lc.fit(data=digits(clients=3, limit=90), rounds=2, cohort=2, workers=0, evaluations=[])
    assert all(record.evaluation == {} and record.clients.keys() == {"train_loss"} for record in run.history)
    assert run.summary["global_accuracy"] is None
    assert run.summary["bytes_up"] > 0


def test_no_evaluation_changes_what_is_learnt() -> None:
    method = lg_fedavg(solver=SOLVER)
    every = (Global(), Local(), Ensemble(), FineTuned(epochs=1))
    runs = [simulation(method, evaluations=some, rounds=3) for some in ((), (Global(),), every)]
    for run in runs:
        list(run)
    assert len({tree_sha256(run.state.server) for run in runs}) == 1
    assert len({tuple(sorted(run.state.personal.items())) for run in runs}) == 1
    assert len({(run.state.ledger.bytes_up, run.state.ledger.bytes_down) for run in runs}) == 1


# --- the server's model ----------------------------------------------------------------------------------------------


def test_validation_data_are_evaluated_beside_the_common_test_set() -> None:
    data = lc.data.with_validation(digits(clients=4), fraction=0.2, seed=0)
    run = simulation(fedavg(solver=SOLVER), data, make_task(data, "mlp"), evaluations=[Global()])
    record = last(run)
    model = run.method.global_model(run.state.server)
    for name, part in (("global", data.test), ("validation", data.validation)):
        for metric, value in evaluate(run.method.task, model, part).means().items():
            assert record[f"{name}_{metric}"] == pytest.approx(value)
    assert record["validation_accuracy"] != record["global_accuracy"]


# --- the ensemble of all clients -------------------------------------------------------------------------------------


def test_the_ensemble_is_the_mean_of_all_clients_outputs() -> None:
    run = simulation(KeepLocal(fedavg(solver=SOLVER), ("0.*",)), rounds=3, evaluations=ALL)
    record = last(run)
    x, y = run.clients.test.tensors()
    outputs = []
    for client in range(6):
        received = run.method.broadcast(run.state.server, ClientInfo(client, 3, 0), Key.from_seed(0))
        assert run.method.local_model is not None
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
    run, without = simulation(method, evaluations=ALL), simulation(method)
    records = list(run)
    assert ["new_accuracy" in record for record in records] == [False, True]
    list(without)
    assert run.state.ledger == without.state.ledger


def test_identical_clients_are_one_model() -> None:
    """§9.5 (h)."""
    slow = KeepLocal(fedavg(solver=Solver(lr=1e-12, local_epochs=1)), ("0.*",))
    record = last(simulation(slow, evaluations=ALL, cohort=6))
    assert record["new_accuracy"] == record["vote_accuracy"] == record["global_accuracy"]
    assert record["new_loss"] == pytest.approx(record["global_loss"], abs=1e-5)


def test_without_models_of_their_own_it_is_the_servers_model() -> None:
    record = last(simulation(fedavg(solver=SOLVER), evaluations=ALL))
    assert record["new_accuracy"] == record["global_accuracy"]
    assert record["new_test_bytes_up"] == 0


@pytest.mark.parametrize("method", [local_only(solver=SOLVER), mtl(solver=SOLVER)])
def test_baselines_have_it_too(method: Any) -> None:
    record = last(simulation(method, evaluations=ALL, cohort=6))
    assert 0 <= record["new_accuracy"] <= 1
    assert record["new_test_bytes_up"] == 6 * (HEADER_BYTES + 4 * 51)


def test_the_number_of_workers_does_not_matter_to_it() -> None:
    method = KeepLocal(fedavg(solver=SOLVER), ("0.*",))
    alone, two = (last(simulation(method, evaluations=ALL, workers=workers)) for workers in (0, 2))
    assert {**alone, "seconds": 0} == {**two, "seconds": 0}


# --- fine-tuning -----------------------------------------------------------------------------------------------------


def shards() -> Federation:
    return digits(clients=6, limit=400, partition={"kind": "label_shards", "shards_per_client": 2})


@pytest.mark.parametrize("method", ["fedavg", "fedpm", "lg_fedavg"])
def test_fine_tuning_raises_local_accuracy_on_label_shards(method: str) -> None:
    """A client with two digits is served badly by all clients' model, and well by what it makes of it."""
    data = shards()
    run = simulation(
        methods.build(method, {"lr": 0.01, "local_steps": 2, "batch_size": 10}),
        data,
        make_task(data, "mlp"),
        evaluations=(Global(), Local(), FineTuned(epochs=5, lr=0.05)),
        cohort=6,
        rounds=3,
    )
    records = list(run)
    assert ["finetuned_accuracy" in record for record in records] == [False, False, True]
    assert records[-1]["finetuned_accuracy"] > 0.8
    assert records[-1]["finetuned_accuracy"] > records[-1]["local_accuracy"] + 0.1
    assert records[-1]["finetuned_accuracy"] > records[-1]["global_accuracy"] + 0.3


def test_fine_tuning_is_a_copys_and_changes_neither_server_nor_clients() -> None:
    data = shards()
    run = simulation(lg_fedavg(solver=SOLVER), data, make_task(data, "mlp"), evaluations=(FineTuned(epochs=3),))
    stream = iter(run)
    next(stream)
    before = None
    for _ in stream:
        before = tree_sha256(run.state.server), dict(run.state.personal)
    without = simulation(lg_fedavg(solver=SOLVER), data, make_task(data, "mlp"), evaluations=())
    list(without)
    assert before == (tree_sha256(without.state.server), dict(without.state.personal))


def test_more_epochs_of_fine_tuning_fit_better() -> None:
    data = shards()
    found = [
        last(simulation(fedavg(solver=SOLVER), data, make_task(data, "mlp"), evaluations=(FineTuned(epochs=epochs),)))
        for epochs in (1, 1, 5)
    ]
    assert found[0]["finetuned_loss"] == found[1]["finetuned_loss"] > found[2]["finetuned_loss"]


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"batch_size": 0}, {"lr": 0.0}, {"lr": float("nan")}])
def test_fine_tuning_that_cannot_be_is_refused_when_it_is_asked_for(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^finetuned: epochs and batch_size must be at least 1 and lr positive"):
        FineTuned(**wrong)


# --- a client that joins later ---------------------------------------------------------------------------------------


def test_a_newcomer_sits_out_and_then_is_always_there() -> None:
    population = Population(8, 3, Newcomer(after=3, others=2))
    rounds = [population.cohort_of(Key.from_seed(number), round=number) for number in range(1, 9)]
    assert all(len(cohort) == 3 and 7 not in cohort for cohort in rounds[:3])
    assert all(len(cohort) == 3 and cohort[-1] == 7 for cohort in rounds[3:])
    assert len({tuple(cohort) for cohort in rounds}) > 4
    assert (population.settled, population.most) == (range(7), 3)
    assert Population(8, 3, Newcomer(after=3, others=5)).most == 6
    with pytest.raises(ConfigError, match="must not be negative"):
        Newcomer(after=-1)


@pytest.mark.parametrize(
    ("newcomer", "cohort", "said"),
    [
        ({"after": 1}, 6, r"run\.cohort is 6, but there are only 5 clients"),
        ({"after": 1, "others": 6}, 4, r"newcomer\.others is 6, but there are only 5 others"),
    ],
)
def test_there_must_be_clients_enough(newcomer: dict[str, int], cohort: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        simulation(fedavg(), small_federation().joined_later(**newcomer), cohort=cohort)


def test_a_newcomer_needs_others() -> None:
    with pytest.raises(DataError, match="a newcomer needs others that are there before it"):
        small_federation(clients=1).joined_later(after=1)


def test_with_nobody_else_only_the_newcomer_moves_the_server() -> None:
    run = simulation(fedavg(solver=SOLVER), small_federation().joined_later(after=2), rounds=4)
    records = list(run)
    assert [record["cohort"] for record in records] == [4, 4, 1, 1]
    assert all("newcomer_accuracy" in record for record in records)


def test_private_leaves_of_the_others_stay_while_a_newcomer_trains() -> None:
    method = KeepLocal(fedavg(solver=SOLVER), ("0.*",), warmup_epochs=2, solver=SOLVER)
    run = simulation(method, small_federation().joined_later(after=2), rounds=5)
    stream = iter(run)
    next(stream)
    next(stream)
    before = dict(run.state.personal)
    rest = list(stream)
    after = dict(run.state.personal)
    assert after.keys() - before.keys() == {5}
    assert all(after[client] == packed for client, packed in before.items())
    assert rest[-1]["local_clients"] == 5  # the newcomer has a figure of its own


def test_an_ensemble_is_without_the_newcomer() -> None:
    method = KeepLocal(fedavg(solver=SOLVER), ("0.*",))
    record = last(simulation(method, small_federation().joined_later(after=1), evaluations=ALL, rounds=3))
    assert record["new_test_models"] == 5


def test_a_newcomer_warms_up_and_the_others_do_not() -> None:
    """The method learns from the population when that is; a newcomer's first private leaves are trained alone."""
    ends = {}
    for epochs in (0, 2):
        method = KeepLocal(fedavg(solver=SOLVER), ("0.*",), warmup_epochs=epochs, solver=SOLVER)
        run = simulation(method, small_federation().joined_later(after=2), rounds=3, cohort=5)
        records = []
        for _ in run:
            records.append((tree_sha256(run.state.server), dict(run.state.personal)))
        ends[epochs] = records
    assert ends[0][1] == ends[2][1], "before it comes, nobody warms up"
    assert ends[0][2] != ends[2][2]


def test_rotated_images() -> None:
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
    with pytest.raises(DataError, match="only images can be rotated"):
        with_rotated_client(small_federation())


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_images_are_rotated_by_so_many_degrees(degrees: int) -> None:
    plain = digits(clients=4)
    x, _ = with_rotated_client(plain, train=20, test=5, degrees=degrees).client(4).train.tensors()
    known = {image.numpy().tobytes() for image in plain.train.tensors()[0]}
    back = torch.rot90(x, -degrees // 90, (2, 3))
    assert all(image.contiguous().numpy().tobytes() in known for image in back)


@pytest.mark.parametrize("degrees", [0, 1, 45, 360])
def test_other_angles_are_refused(degrees: int) -> None:
    with pytest.raises(DataError, match=f"rotated by 90, 180 or 270 degrees, got {degrees}"):
        with_rotated_client(digits(clients=4), degrees=degrees)


NEWCOMER = """
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

[newcomer]
rounds = 3
fraction = 0.5
train = 60
test = 30
"""


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "lg_fedavg"])
def test_the_section_of_a_newcomer(tmp_path: Path, method: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(NEWCOMER.format(method=method))
    assert experiment_from(read_table(path)).simulation.clients.num_clients == 4  # it must be asked for
    made = experiment_from(read_table(path, ["newcomer.enabled=true"]))
    assert made.simulation.schedule.rounds == 5
    assert made.simulation.population == Population(5, 2, Newcomer(after=2, others=2))
    assert made.config["newcomer"]["degrees"] == 90
    run = made.run()
    assert run.summary["newcomer_accuracy"] is not None
    assert [record["cohort"] for record in run.history] == [2, 2, 3, 3, 3]


def test_without_rotation_a_newcomer_is_the_datas_own_last_client(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(NEWCOMER.format(method="fedavg"))
    made = experiment_from(read_table(path, ["newcomer.enabled=true", "newcomer.degrees=0", "newcomer.fraction=1.0"]))
    assert made.simulation.population == Population(4, 2, Newcomer(after=2, others=3))
    run = made.run()
    assert [record["cohort"] for record in run.history] == [2, 2, 4, 4, 4]


def test_the_flag_of_a_newcomer(tmp_path: Path, laconic: Any) -> None:
    path = tmp_path / "run.toml"
    path.write_text(NEWCOMER.format(method="fedavg"))
    said = laconic("run", path, "--newcomer", "--out", tmp_path)
    assert said.code == 0, said.err
    assert "newcomer" in said.out
    written = tmp_path / "run" / "config.toml"
    assert "enabled = true" in written.read_text()
    again = experiment_from(read_table(written)).simulation  # the file says all
    assert (again.schedule.rounds, again.clients.num_clients) == (5, 5)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("newcomer.fraktion=0.5", r"\[newcomer\]: unknown key 'fraktion'; did you mean 'fraction'\?"),
        ("newcomer.fraction=2.0", r"newcomer.fraction must lie in \[0, 1\], got 2.0"),
        ("newcomer.degrees=45", "newcomer.degrees must be 0, 90, 180 or 270, got 45"),
        ("newcomer.rounds=0", "newcomer.rounds must be at least 1, got 0"),
    ],
)
def test_mistakes_about_a_newcomer(tmp_path: Path, override: str, said: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(NEWCOMER.format(method="fedavg"))
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
    with pytest.raises(DataError, match="a probe needs protected attributes, which these data do not have"):
        experiment(data=small_federation(), run=RunSettings(cohort=2, evaluations=(Probe(layer="fc1"),)))


def test_a_probe_of_a_layer_that_is_not_there_is_refused_before_the_first_round() -> None:
    run = RunSettings(cohort=2, evaluations=({"name": "probe", "layer": "fc7"},))
    with pytest.raises(ConfigError, match=r"^probe: the model has no layer 'fc7'; did you mean 'fc[12]'\?"):
        experiment(data=marked(), run=run)


@pytest.mark.parametrize("method", [fedavg(solver=SOLVER), KeepLocal(fedavg(solver=SOLVER), ("0.*",))])
def test_a_probe_is_made_once_at_every_client(method: Method) -> None:
    data = marked()
    task = Task(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    records = list(simulation(method, data, task, evaluations=[Probe(layer="0")], cohort=2))
    found = [sorted(name for name in record.evaluation if "auc" in name) for record in records]
    assert found == [[], ["auc", "posthoc_auc_0", "posthoc_auc_1"]]
    assert records[-1]["posthoc_auc_0"] > records[-1]["posthoc_auc_1"]


def test_areas_under_curves() -> None:
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 8, 200).astype(np.float32), rng.random(200) > 0.6
    ours = roc_auc(torch.from_numpy(scores), torch.from_numpy(labels))
    assert ours == pytest.approx(roc_auc_score(labels, scores))
    assert np.isnan(roc_auc(torch.zeros(3), torch.tensor([True, True, True])))
