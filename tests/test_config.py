"""TOML files: defaults, overrides, what is recorded, and one sentence for everything that is wrong."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from laconic.config import experiment_from, read_table, read_tables
from laconic.core import ConfigError, DataError, UserError
from laconic.experiment import Experiment

SMALL = """
[run]
rounds = 2
cohort = 2
workers = 0

[data]
source = "digits"
clients = 4
limit = 80
"""

MEMORY = {"down_memory": "auto", "memory": "1 GiB"}


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Experiment]:
    """The experiment of a file, with overrides."""

    def make(*overrides: str, text: str = SMALL) -> Experiment:
        (tmp_path / "run.toml").write_text(text)
        return experiment_from(read_table(tmp_path / "run.toml", overrides))

    return make


# --- what a file means -------------------------------------------------------------------------------------------


def test_an_empty_file_is_a_run(made: Any) -> None:
    experiment = made(text="")
    config = experiment.config
    assert (config["data"]["source"], config["model"]["name"], config["method"]["name"]) == ("digits", "mlp", "fedavg")
    assert config["link"] == {"up": "float32", "down": "float32", **MEMORY}
    assert config["run"] == {
        **{"name": "run", "seed": 0, "checkpoint_every": 10, "device": "cpu", "rounds": 30, "cohort": 10},
        **{"eval_every": 5, "min_replies": 1, "evaluations": ["global", "local"], "workers": "auto"},
        **{"store": "memory", "max_norm": "auto", "max_weight": "auto"},
        **{"precision": "float32", "layout": "contiguous", "validation": None, "stop": None},
    }


def test_a_link_that_is_left_out_is_the_one_that_the_method_is_made_for(made: Any) -> None:
    experiment = made("method.name=fedpm")
    assert experiment.config["link"] == {"up": "mask", "down": "mask", **MEMORY}
    link = experiment.simulation.agreement.link
    assert (link.up.text, link.down.text) == ("mask", "mask")
    mixed = made("method.name=fedmask", "link.up='mask:model=global'")
    assert mixed.config["link"] == {"up": "mask:model=global", "down": "mask", **MEMORY}
    plain = made("method.name=fedpm", "link.down=float32")
    assert plain.config["link"] == {"up": "mask", "down": "float32", **MEMORY}
    assert made("link.up=drive").config["link"] == {"up": "drive", "down": "float32", **MEMORY}


def test_masks_settings_in_a_file(made: Any) -> None:
    experiment = made("method.name=fedpm", "method.reset=4", "method.ste=theta", "method.lr=0.05")
    settings = experiment.simulation.agreement.settings
    assert [settings[name] for name in ("reset", "ste", "lr", "batch_size")] == [4, "theta", 0.05, 128]
    assert experiment.config["method"]["local_epochs"] == 3
    assert experiment.config["method"]["optimizer"] == "adam"
    with pytest.raises(ConfigError, match="lambda0 must be finite and at least 1"):
        made("method.name=fedpm", "method.lambda0=0.5")


def test_the_file_of_the_issue(made: Any) -> None:
    experiment = made(
        text="""
        [run]
        name = "digits-fedavg"
        seed = 0
        rounds = 30
        cohort = 10
        eval_every = 5
        workers = "auto"
        [data]
        source = "digits"
        clients = 50
        partition = { kind = "dirichlet", alpha = 0.3 }
        [model]
        name = "mlp"
        hidden = [64]
        [method]
        name = "fedavg"
        local_epochs = 1
        batch_size = 20
        lr = 0.05
        [link]
        up = "float32"
        down = "float32"
        """
    )
    assert experiment.name == "digits-fedavg"
    settings = experiment.simulation.agreement.settings
    assert [settings[name] for name in ("local_epochs", "batch_size", "lr")] == [1, 20, 0.05]
    assert experiment.simulation.clients.num_clients == 50
    assert experiment.simulation.schedule.rounds == 30


def test_what_is_recorded_gives_the_same_run_again(made: Any, tmp_path: Path) -> None:
    """The resolved configuration is complete (every default is in it) and means the same."""
    first = made("data.partition={kind='dirichlet',alpha=0.5}", "method.name=fedopt", "link.up=ef(topk:fraction=0.1)")
    written = tomli_w.dumps(without_none(first.config))
    again = made(text=written)
    assert without_none(again.config) == without_none(first.config) == tomllib.loads(written)
    assert again.simulation.agreement.fingerprint == first.simulation.agreement.fingerprint
    records = [[{**record, "seconds": 0} for record in each.simulation] for each in (first, again)]
    assert records[0] == records[1]
    assert first.config["method"]["server"]["name"] == "adam"
    assert first.config["method"]["lr"] == first.simulation.agreement.settings["lr"]


def without_none(config: Any) -> Any:
    if isinstance(config, dict):
        return {name: without_none(value) for name, value in config.items() if value is not None}
    return [without_none(value) for value in config] if isinstance(config, list | tuple) else config


def test_the_run_s_seed_is_the_partition_s_too(made: Any) -> None:
    def rows(experiment: Experiment) -> list[int]:
        return experiment.simulation.clients.client(0).train.index.tolist()

    assert rows(made("run.seed=1")) != rows(made("run.seed=2"))
    assert rows(made("run.seed=1", "data.seed=5")) == rows(made("run.seed=2", "data.seed=5"))
    assert made("run.seed=3").config["data"]["seed"] == 3


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("run.seed=7", "run", "seed", 7),
        ("method.lr=0.1", "method", "lr", 0.1),
        ("method.lr = 1e-2", "method", "lr", 0.01),
        ("run.layout=channels_last", "run", "layout", "channels_last"),
        ('run.evaluations=["local"]', "run", "evaluations", ["local"]),
        (
            'run.evaluations=["global", {name="finetuned",epochs=2}]',
            *("run", "evaluations", ["global", {"name": "finetuned", "epochs": 2}]),
        ),
        ("model.hidden=[3, 4]", "model", "hidden", [3, 4]),
        ("run.name=abc", "run", "name", "abc"),
        ("run.name='abc'", "run", "name", "abc"),
        ('run.name="1"', "run", "name", "1"),
        ("run.workers=auto", "run", "workers", "auto"),
        ("run.workers=1", "run", "workers", 1),
        ("link.up=eden:bits=2", "link", "up", "eden:bits=2"),
        ('link.up=["topk:fraction=0.1", "eden:bits=4"]', "link", "up", "topk:fraction=0.1 | eden:bits=4"),
        ("data.partition=iid", "data", "partition", "iid"),
        ("data.partition={kind='dirichlet',alpha=0.3}", "data", "partition", {"kind": "dirichlet", "alpha": 0.3}),
        ("data.partition.kind=dirichlet", "data", "partition", {"kind": "dirichlet"}),
    ],
)
def test_overrides_have_the_types_of_toml(made: Any, override: str, section: str, key: str, value: Any) -> None:
    recorded = made(override).config[section][key]
    assert (recorded, type(recorded)) == (value, type(value))


def test_later_overrides_win(made: Any) -> None:
    assert made("run.seed=1", "run.seed=2").config["run"]["seed"] == 2


# --- what is wrong -----------------------------------------------------------------------------------------------

WRONG = {
    # unknown keys and sections
    "run.cohrt=3": "[run]: unknown key 'cohrt'; did you mean 'cohort'?",
    "data.client=3": "unknown key 'client'; did you mean 'clients'?",
    "model.hiden=[3]": "[model] mlp: unknown key 'hiden'; did you mean 'hidden'?",
    "method.learning=1": "[method] fedavg: unknown key 'learning';",
    "link.upp='x'": "[link]: unknown key 'upp'; did you mean 'up'?",
    "metod.lr=1": "unknown section [metod]; did you mean 'method'?",
    "data.partition={kind='dirichlet',alfa=1}": "unknown key 'alfa'; did you mean 'alpha'?",
    # wrong types
    "run.rounds='3'": "rounds: should be a valid integer, got '3'.",
    "run.rounds=2.5": "rounds: should be a valid integer, got 2.5.",
    "run.rounds=true": "rounds: should be a valid integer, got True.",
    "run.name=3": "name: should be a valid string, got 3.",
    "run.name=2020-01-01": "name: a date is no setting, got 2020-01-01.",
    "newcomer.enabled=1": "enabled: should be a valid boolean, got 1.",
    "run.channels_last=true": "run.channels_last is no more; set layout to 'channels_last' or 'contiguous'.",
    "run.layout=rows": "layout: should be 'auto', 'contiguous' or 'channels_last', got 'rows'.",
    "run.precision=float16": "precision: should be 'float32' or 'bfloat16', got 'float16'.",
    "run.evaluations=global": "[run]: evaluations: should be a valid array, got 'global'.",
    "run.evaluations=[3]": "run.evaluations: 3 is no evaluation; known: global, local",
    "run.evaluations=[{layer='fc1'}]": "run.evaluations: {'layer': 'fc1'} needs a name; known: global, local",
    # what stood elsewhere in 0.1
    "run.new_test=true": 'run.new_test is no more; add "ensemble" to run.evaluations.',
    "run.local_eval=false": 'run.local_eval is no more; leave "local" out of run.evaluations.',
    "run.probe=fc3": 'run.probe is no more; add { name = "probe", layer = … } to run.evaluations.',
    "run.newcomer={after=3}": "run.newcomer is no more; give a section [newcomer], or data.joined_later(after=…)",
    "new_device.enabled=true": "the section [new_device] is [newcomer] now, where turns = 1 is degrees = 90;",
    "run.workers=abc": "got 'abc'.",
    "method.lr=abc": "lr: should be a valid number, got 'abc'.",
    "model.hidden=3": "hidden: should be a valid array, got 3.",
    "model.hidden=[1,'x']": "hidden: should be a valid integer, got 'x'.",
    "method.name=3": "[method] name must be a name, got 3.",
    "data.source=['digits']": "[data] source must be a name, got ['digits'].",
    "link.up=3": "should be a valid string or a valid array, got 3.",
    "run.seed.x=1": "seed: should be a valid integer, got {'x': 1}.",
    # out of range
    "run.rounds=0": "run.rounds must be at least 1, got 0.",
    "run.seed=-1": "run.seed must be a whole number and not negative, got -1.",
    "run.checkpoint_every=0": "run.checkpoint_every must be at least 1, got 0.",
    "run.min_replies=3": "run.min_replies (3) is larger than run.cohort (2).",
    "run.workers=-2": "run.workers must be 'auto' or not negative, got -2.",
    "method.lr=-1": "lr must be positive and finite, got -1.0.",
    "method.lr=nan": "lr must be positive and finite, got nan.",
    "run.cohort=5": "run.cohort is 5, but there are only 4 clients; lower run.cohort or raise data.clients.",
    "run.device=nonsense": "run.device 'nonsense' cannot be used here:",
    # unknown names
    "method.name=fedavgg": "unknown method 'fedavgg'; did you mean 'fedavg'?",
    "model.name=lenet55": "unknown model 'lenet55'; did you mean 'lenet5'?",
    "data.source=digitz": "'digitz'; did you mean 'digits'?",
    "data.partition=iidd": "unknown partition 'iidd'; did you mean 'iid'?",
    "link.up=flat32": "unknown codec 'flat32'; did you mean 'float32'?",
    "link.down=eden:bit=2": "'bit'",
    "run.evaluations=['globl']": "unknown evaluation 'globl'; did you mean 'global'?",
    # what cannot be had
    "data.clients=100000": "100000 clients cannot share 80 training examples; ask for fewer clients.",
    "data.partition={kind='label_shards',shards_per_client=1000}": "1000",
    # a user's own code
    "model.name=no_such_module:Net": "model 'no_such_module:Net': cannot import 'no_such_module'",
    "model.name=torch.nn:Lineer": "'torch.nn' has no 'Lineer'; did you mean 'Linear'?",
    "model.loss=math": "model.loss 'math' must have the form \"module.path:Name\".",
    "model.loss=math:pi": "model.loss 'math:pi' must be something that can be called, got float.",
    "model.loss=math:sqrt": "the model does not fit the data: inputs of shape (1, 8, 8)",
    "model.metrics={top='x'}": "model.metrics.top 'x' must have the form",
    "model.init=nowhere.safetensors": "[model] init: cannot read nowhere.safetensors",
    "data.source=os.path:join": "data.source 'os.path:join' failed with TypeError (join() got an unexpected keyword",
    "data.source=builtins:dict": "data.source 'builtins:dict' must give a laconic Federation, got dict.",
    # --set itself
    "foo": "--set takes section.key=value, got 'foo'.",
    "run=3": "--set takes section.key=value, got 'run=3'.",
    "=3": "--set takes section.key=value, got '=3'.",
    "run.=3": "--set takes section.key=value, got 'run.=3'.",
    ".seed=3": "--set takes section.key=value, got '.seed=3'.",
    "run.seed.x.y=1": "seed",
}


@pytest.mark.parametrize("override", WRONG)
def test_what_is_wrong_is_said_in_one_sentence(made: Any, override: str) -> None:
    with pytest.raises(UserError) as caught:
        made(override)
    said = str(caught.value)
    assert WRONG[override] in said
    assert "\n" not in said
    assert re.search(r"[.?\"]$", said), said


def test_a_value_is_no_section(made: Any) -> None:
    with pytest.raises(ConfigError, match=r"run must be a section of settings, got 3"):
        made(text="run = 3")
    with pytest.raises(ConfigError, match=r"--set run\.seed=1: 'run' is a value, not a section"):
        made("run.seed=1", text="run = 3")


@pytest.mark.parametrize("text", ["[run", "a = ", "[run]\nseed = 1\nseed = 2", "x = 1e", "\x00"])
def test_invalid_toml(made: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.toml is not valid TOML: [^\n]*\.$"):
        made(text=text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml: no such file or directory\."):
        read_table(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"cannot read .*: is a directory\."):
        read_table(tmp_path)
    (tmp_path / "latin.toml").write_bytes('[run]\nname = "ü"'.encode("latin-1"))
    with pytest.raises(ConfigError, match="is not valid TOML"):
        read_table(tmp_path / "latin.toml")


def test_missing_data_is_named(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LACONIC_DATA", str(tmp_path / "nowhere"))
    text = '[data]\nsource = "mnist"\nclients = 10'
    with pytest.raises(DataError, match=r"mnist: .*nowhere"):
        made(text=text)
    monkeypatch.setenv("LACONIC_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"mnist: "):
        made(text=text)


def test_nothing_is_left_by_a_file_that_is_wrong(made: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        made("run.cohort=99")
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


# --- a user's own code -------------------------------------------------------------------------------------------

OWN = """
import numpy as np
import torch
from torch import nn
from laconic import Federation

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x):
        return self.layers(x)

def points(clients=4, bad=False):
    if bad:
        raise RuntimeError("the disk\\nis gone")
    random = np.random.default_rng(0)
    x = random.standard_normal((clients * 20, 3)).astype("float32")
    return Federation.from_arrays((x, (x.sum(1) > 0).astype("int64")), clients=clients, name="points")

def loss(output, target):
    return nn.functional.cross_entropy(output, target, label_smoothing=0.1)

def sure(output, target):
    return (output.softmax(1).amax(1) > 0.5).float()

def gentle(*, mu: float = 1.0):
    from laconic import fedprox
    return fedprox(mu=mu)

def nothing():
    return None

def in_order(examples, clients, key):
    from laconic.data import Assignment, Ragged
    cut = lambda first, last: Ragged.from_lists(np.array_split(np.arange(first, last), clients))
    return Assignment(cut(0, examples.num_train), cut(examples.num_train, len(examples.labels)))
"""
OWN_TOML = """
[run]
rounds = 2
cohort = 3
workers = 0
[data]
source = "MODULE:points"
clients = 5
[model]
name = "MODULE:Net"
width = 6
loss = "MODULE:loss"
metrics = { sure = "MODULE:sure", accuracy = "laconic.core:accuracy" }
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A module of the user's in the current folder; gives the text of a file that uses it."""
    module = f"own_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return lambda: OWN_TOML.replace("MODULE", module)


def test_a_users_own_model_data_loss_and_metrics(made: Any, own: Any) -> None:
    experiment = made(text=own())
    simulation = experiment.simulation
    assert simulation.clients.name == "points"
    assert simulation.clients.num_clients == 5
    assert simulation.state.server["w/layers.0.weight"].shape == (6, 3)
    *_, last = simulation
    assert {"global_sure", "global_accuracy", "global_loss", "local_sure"} <= set(last)
    written = tomli_w.dumps(without_none(experiment.config))
    again = made(text=written)
    *_, other = again.simulation
    assert {**other, "seconds": 0} == {**last, "seconds": 0}


def test_errors_in_a_users_own_code_are_one_sentence(made: Any, own: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.source '.*:points' failed with RuntimeError \(the disk is gone\)\.$"):
        made("data.bad=true", text=own())
    with pytest.raises(ConfigError, match=r"unknown key 'widht'; did you mean 'width'"):
        made("model.widht=3", text=own())


def test_a_users_own_method_and_partition(made: Any, own: Any) -> None:
    module = own().split('source = "')[1].split(":")[0]
    words = [f"data.partition.kind={module}:in_order"]
    experiment = made(*words, f"method.name={module}:gentle", "method.mu=0.5")
    assert experiment.simulation.agreement.name == "fedprox"
    assert experiment.config["method"] == {"name": f"{module}:gentle", "mu": 0.5}
    rows = experiment.simulation.clients.train_rows[1].tolist()
    assert rows == list(range(rows[0], rows[0] + len(rows)))
    with pytest.raises(ConfigError, match=r"unknown key 'nu'; known: mu"):
        made(*words, f"method.name={module}:gentle", "method.nu=0.5")
    with pytest.raises(ConfigError, match=r"method '.*:nothing' must give a laconic Method, got NoneType"):
        made(*words, f"method.name={module}:nothing")


# --- sweeps ----------------------------------------------------------------------------------------------------------


def swept(folder: Path, sweep: str, *overrides: str, name: str = "") -> list[tuple[str, Any]]:
    (folder / "many.toml").write_text(SMALL.replace("[run]", f"[run]\n{name}") + sweep)
    return read_tables(folder / "many.toml", overrides)


def test_a_file_without_a_sweep_is_one_run(tmp_path: Path) -> None:
    assert [name for name, _ in swept(tmp_path, "")] == ["many"]
    assert [name for name, _ in swept(tmp_path, "", name='name = "own"')] == ["own"]


def test_a_sweep_is_every_combination(tmp_path: Path) -> None:
    found = swept(
        tmp_path,
        """
[sweep]
link.up = ["float32", "eden:bits=2"]
"data.partition" = ["iid", { kind = "dirichlet", alpha = 0.5 }]
""",
        "run.rounds=7",
    )
    assert [name for name, _ in found] == [
        "up=float32, partition=iid",
        "up=float32, partition:kind=dirichlet,alpha=0.5",
        "up=eden:bits=2, partition=iid",
        "up=eden:bits=2, partition:kind=dirichlet,alpha=0.5",
    ]
    assert [table["link"]["up"] for _, table in found] == ["float32", "float32", "eden:bits=2", "eden:bits=2"]
    assert all(table["run"]["rounds"] == 7 and table["data"]["clients"] == 4 for _, table in found)
    for _, table in found:
        experiment_from(table)


def test_a_sweep_over_whole_sections(tmp_path: Path) -> None:
    found = swept(tmp_path, '[sweep]\nmethod = [{ name = "fedavg" }, { name = "fedprox", mu = 0.1 }]')
    assert [name for name, _ in found] == ["fedavg", "fedprox:mu=0.1"]
    assert [table["method"] for _, table in found] == [{"name": "fedavg"}, {"name": "fedprox", "mu": 0.1}]


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ("[sweep]\nlink.up = 'drive'", r"\[sweep\] link.up must be a list of values to try, got 'drive'"),
        ("[sweep]\nlink.up = []", r"\[sweep\] link.up must be a list of values to try, got \[\]"),
        ("[sweep]\nrun.seed = [1, 2]", r"\[sweep\] run.seed: seeds are given by --seeds"),
        ("[sweep]\nlnk.up = ['drive']", r"unknown section \[lnk\]; did you mean 'link'"),
        ("[sweep]\ndata.clients.x = [1]", r"\[sweep\] data.clients.x: 'clients' is a value, not a section"),
    ],
)
def test_sweeps_that_are_none(tmp_path: Path, sweep: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        swept(tmp_path, sweep)
