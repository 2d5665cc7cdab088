"""LG-FedAvg, tables 1, 3 and 4: local and new accuracy, a device that joins later, fairness (Liang et al., 2020).

Volumes are in parameters, by the paper's own formula. What its code does besides is in docs/methods/lg_fedavg.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from laconic.engine import plot
from laconic.methods.local_global import paper_parameters, paper_parameters_mtl
from laconic.report import RunRecord
from laconic.reproduce.training import Arm, Figure, Runs, Training, summed_up, training_recipe

LOCAL, NEW, VOLUME = "local accuracy, %", "new accuracy, %", "parameters sent, 1e9"

# --- table 1 ---------------------------------------------------------------------------------------------------------


def _metric(run: RunRecord) -> str:
    """Whose accuracy on devices' data counts: that of their own models, or of the server's where they have none."""
    method = (run.summary or {}).get("method")
    return "global_accuracy" if method in ("fedavg", "fedprox") else "local_accuracy"


def _local(run: RunRecord, _: RunRecord | None) -> float | None:
    """Each device's own model on its own test data; where there are none, the server's model: one figure for both."""
    value = (run.summary or {}).get(_metric(run))
    return None if value is None else 100 * value


def _volume(run: RunRecord, _: RunRecord | None) -> float | None:
    """What the paper would count for these rounds."""
    summary, method = run.summary or {}, run.config["method"]
    size = {"devices": summary["clients"], "parameters": summary["parameters"]}
    if summary["method"] == "mtl":
        return 1e-9 * paper_parameters_mtl(rounds=summary["rounds"], **size)
    if summary["method"] not in ("fedavg", "lg_fedavg"):
        return None
    first = method.get("fedavg_rounds", summary["rounds"])
    counted = paper_parameters(
        fraction=summary["cohort"] / summary["clients"],
        rounds=first,
        lg_rounds=summary["rounds"] - first,
        global_=int(summary.get("global_parameters", summary.get("shared_parameters", 0))),
        **size,
    )
    return 1e-9 * counted


def _own_models(found: Runs, figure: Any) -> None:
    """Devices' own models on their own data against bytes; where there are none, the server's model."""
    histories = {
        name: [[{**line, "local_accuracy": line.get(_metric(run))} for line in run.history] for run in runs]
        for name, runs in found.items()
        if name != "local" or len(found) == 1  # it sends nothing: it has no place on this axis
    }
    plot(histories, metric="local_accuracy", axes=figure.add_subplot()).set_xlabel("bytes sent, both ways")


FIGURES = (
    Figure(LOCAL, _local, tolerance=1.0),
    Figure(NEW, summed_up("new_accuracy", times=100), tolerance=1.5),
    Figure(VOLUME, _volume, tolerance=0.5),
)
_LG = ("method.name=lg_fedavg",)
_FEDAVG = ("method.name=fedavg", "method.weighting=examples")
# All devices in every round, an epoch each. The published code has up to 100 epochs (MNIST) and stops by test accuracy;
# 25 are what a small machine has time for.
_ALONE = ("method.name=local_only", "run.cohort=100")


def _printed(local: float, new: float | None = None, volume: float | None = None) -> dict[str, float]:
    named = {LOCAL: local, NEW: new, VOLUME: volume}
    return {label: value for label, value in named.items() if value is not None}


def _common(source: str, model: str, *, batch: int, partition: str, more: str = "") -> str:
    return f"""
[run]
cohort = 10
eval_every = 25
evaluations = ["global", "local", "ensemble"]

[data]
source = "{source}"
clients = 100
partition = {partition}

[model]
name = "{model}"

[method]
local_epochs = 1
batch_size = {batch}
lr = 0.1
momentum = 0.5
clip_norm = 5.0
{more}"""


_SHARDS = '{ kind = "label_shards", shards_per_client = 2 }'
_TWO_PHASES = ("run.rounds=450", "method.fedavg_rounds=400")
_LG_MNIST = (*_LG, *_TWO_PHASES, "method.lg_lr=0.05", "method.global_layers=3")
_LG_FEDSPARSE = (
    *("method.name=lg_fedsparse", *_TWO_PHASES, "method.fedavg_lr=0.1", "method.lr=0.05", "method.weighting=examples"),
    *("method.global_layers=3", "method.global_part=last", 'method.server={ name = "adam", lr = 0.001 }'),
)
_MNIST = Training(
    _common("mnist", "lg_mlp", batch=10, partition=_SHARDS),
    (
        Arm("fedavg", (*_FEDAVG, "run.rounds=725"), _printed(98.15, 98.15, 50.5)),
        Arm("lg", _LG_MNIST, _printed(98.66, 97.81, 28.0)),
        Arm("lg-two-layers", (*_LG_MNIST, "method.global_layers=2"), _printed(98.66, 97.81, 28.0), seeds=1),
        Arm("lg-eden", (*_LG_MNIST, "link.up=eden:bits=2"), seeds=1),
        Arm("lg-fedsparse-low", (*_LG_FEDSPARSE, "method.sparsity=low"), seeds=1),
        Arm("lg-fedsparse", _LG_FEDSPARSE, seeds=1),
        Arm("local", (*_ALONE, "run.rounds=25"), _printed(97.17, 84.01)),
        Arm(
            "mtl",
            ("method.name=mtl", "method.lambda1=1e-7", "method.lambda2=1e-7", "run.rounds=400"),
            _printed(97.12, 79.63, 50.7),
        ),
    ),
    FIGURES,
    seeds=3,
    picture=_own_models,
)
_CIFAR10 = Training(
    _common("cifar10", "lg_cnn", batch=50, partition=_SHARDS),
    (
        Arm("fedavg", (*_FEDAVG, "run.rounds=1850"), _printed(59.94, 59.94, 13.04), small=("run.rounds=660",)),
        Arm(
            "lg",
            (
                *_LG,
                "run.rounds=1260",
                "method.global_layers=2",
                "method.global_part=first",
                "method.fedavg_rounds=1200",
            ),
            _printed(89.66, 59.63, 8.48),
            small=("run.rounds=660", "method.fedavg_rounds=600"),
        ),
        Arm("local", (*_ALONE, "run.rounds=200"), _printed(86.81, 54.83), small=("run.rounds=50",)),
        Arm(
            "mtl",
            ("method.name=mtl", "method.lambda1=1e-6", "method.lambda2=1e-6", "run.rounds=1400"),
            _printed(86.65, 45.63, 17.95),
            small=("run.rounds=660",),
        ),
    ),
    FIGURES,
    scale=0.5,
    picture=_own_models,
)
_SOLVER = ("method.optimizer=adam", "method.local_epochs=1", "method.batch_size=32", "method.lr=0.001")
_VQA = Training(
    """
[run]
cohort = 5
eval_every = 5
evaluations = ["global", "local", "ensemble"]

[data]
source = "easy_vqa"
clients = 50

[model]
name = "vqa"
""",
    (
        Arm("fedavg", ("method.name=fedavg", "run.rounds=47", *_SOLVER), small=("run.rounds=40",)),
        Arm(
            "lg",
            (*_LG, 'method.private=["image.*", "question.*"]', "run.rounds=49", "method.fedavg_rounds=32", *_SOLVER),
            small=("run.rounds=40", "method.fedavg_rounds=20"),
        ),
    ),
    FIGURES,
    scale=0.5,
    small=("model.embedding=32", "model.hidden=64", "model.features=128", "model.joint=128"),
    picture=_own_models,
)

# --- table 3: a device with rotated digits joins ---------------------------------------------------------------------

OTHERS, JOINED = "accuracy of the others, %", "accuracy of the new device, %"
_NEWCOMER = """
[newcomer]
enabled = true
rounds = 500
train = 3000
test = 500
degrees = 90
"""


def _newcomers(found: Runs, figure: Any) -> None:
    """The others on their own data (by the server's model where they have none), and the new device, dashed."""
    axes = figure.add_subplot()
    for number, (name, (run, *_)) in enumerate(found.items()):
        for key, style, label in ((_metric(run), "-", name), ("newcomer_accuracy", "--", None)):
            points = [(line["round"], 100 * line[key]) for line in run.history if line.get(key) is not None]
            axes.plot(*zip(*points, strict=True), style, color=f"C{number}", label=label)
    axes.set_xlabel("round")
    axes.set_ylabel("accuracy of the others; dashed: of the new device, %")
    axes.grid(alpha=0.3)
    axes.legend()


def _rotated(partition: str, rounds: int, paper: dict[str, tuple[float, float]]) -> Training:
    """`rounds` before the device joins: about as many as reach 98 %. The last tenth are LG's own."""
    before = f"run.rounds={rounds}"
    first = f"method.fedavg_rounds={rounds * 9 // 10}"
    methods = {
        "fedavg": _FEDAVG,
        "lg": (*_LG, "method.global_layers=3", first, "method.lg_lr=0.05", "method.warmup_epochs=5"),
        **{
            f"fedprox-{mu}": ("method.name=fedprox", "method.weighting=examples", f"method.mu={mu}")
            for mu in (0.01, 0.1, 1.0)
        },
    }
    arms = []
    for fraction in ("0.0", "0.1"):
        for name, settings in methods.items():
            if fraction == "0.0" and "fedprox" in name:
                continue  # the paper has it for C = 0.1 only
            known = paper.get(f"{name.split('-')[0]}, C = {fraction}")
            printed = dict(zip((OTHERS, JOINED), known, strict=True)) if known else {}
            small = (before, first) if name == "lg" else (before,)  # what the recipe's own scale does not shorten
            settings_ = (*settings, before, f"newcomer.fraction={fraction}")
            arms.append(Arm(f"{name}-c{fraction}", settings_, printed, small))
    figures = (
        # The ensemble of the old devices' own models on the common test set: the server's model where they have none.
        Figure(OTHERS, summed_up("new_accuracy", times=100), tolerance=2.0),
        Figure(JOINED, summed_up("newcomer_accuracy", times=100), tolerance=2.0),
    )
    common = _common("mnist", "lg_mlp", batch=10, partition=partition, more=_NEWCOMER)
    return Training(common, tuple(arms), figures, scale=0.2, picture=_newcomers)


_ROTATED = {
    "iid": _rotated(
        '"iid"',
        60,
        {
            "fedavg, C = 0.0": (32.01, 91.83),
            "lg, C = 0.0": (96.55, 92.92),
            "fedavg, C = 0.1": (97.35, 89.29),
            "fedprox, C = 0.1": (94.82, 87.19),
            "lg, C = 0.1": (97.66, 93.16),
        },
    ),
    "noniid": _rotated(
        _SHARDS,
        200,
        {
            "fedavg, C = 0.0": (35.70, 93.58),
            "lg, C = 0.0": (96.31, 94.12),
            "fedavg, C = 0.1": (96.89, 89.62),
            "fedprox, C = 0.1": (97.86, 91.58),
            "lg, C = 0.1": (98.16, 93.88),
        },
    ),
}

# --- table 4: fairness -----------------------------------------------------------------------------------------------

CORRECT, AUC, ADVERSARY = "accuracy, %", "AUC, %", "AUC of an adversary that is fitted afterwards, %"
RACE, SEX = "its AUC for race, %", "its AUC for sex, %"


def _adversary(run: RunRecord, _: RunRecord | None) -> float | None:
    """The mean over the protected attributes."""
    values = [value for key, value in (run.summary or {}).items() if key.startswith("posthoc_auc_")]
    return 100 * statistics.fmean(values) if values else None


_STRONG = (
    *("run.rounds=40", "run.eval_every=4", "model.dropout=0.0"),
    *("method.optimizer=adam", "method.lr=0.001", "method.batch_size=2000", "method.local_epochs=20"),
    'method.adversary={ steps = 5, optimizer = "adam", lr = 0.01, standardize = true, weight_decay = 0.0002 }',
)
"""Five steps of Adam on all of a device's examples for every step of the model; what noise hides is seen without it.
λ = 0 is what these settings give without an adversary."""


def _trade_off(found: Runs, figure: Any) -> None:
    """Accuracy against what an adversary that is fitted afterwards tells; the arms of one adversary joined over λ."""
    axes = figure.add_subplot()

    def at(runs: Sequence[RunRecord], key: str) -> tuple[float, float]:
        told, right = ([(run.summary or {})[k] for run in runs] for k in (key, _metric(runs[0])))
        return 100 * statistics.fmean(told), 100 * statistics.fmean(right)

    for number, (key, attribute) in enumerate((("posthoc_auc_0", "race"), ("posthoc_auc_1", "sex"))):
        color = f"C{number}"
        for kind, marker in (("fedavg", "s"), ("lg", "^")):
            if kind in found:
                axes.plot(*at(found[kind], key), marker, color=color, label=f"{kind}, {attribute}")
        for kind, style in (("lg-adversary", ".:"), ("lg-strong", "o-")):
            points = {name: at(runs, key) for name, runs in found.items() if name.startswith(f"{kind}-")}
            if points:
                axes.plot(*zip(*points.values(), strict=True), style, color=color, label=f"{kind}, {attribute}")
            for name, place in points.items():
                weight = name.rpartition("-")[2]
                axes.annotate(weight, place, fontsize=6, xytext=(3, 3), textcoords="offset points")
    axes.axvspan(45, 55, alpha=0.1)
    axes.set_xlabel("AUC of an adversary fitted afterwards, %")
    axes.set_ylabel("local accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def _adult(data: str, paper: dict[str, tuple[float, float, float]], weights: tuple[str, ...]) -> Training:
    """`weights` are the λ of the strong adversary; two of them have all seeds."""

    def against(weight: str) -> tuple[str, ...]:
        return (*methods["lg"], "method.objective=adversary", f"method.objective_weight={weight}")

    methods = {"fedavg": _FEDAVG, "lg": (*_LG, "method.global_layers=3")}
    printed = {name: dict(zip((CORRECT, AUC, ADVERSARY), figures, strict=True)) for name, figures in paper.items()}
    arms = [Arm(name, settings, printed[name]) for name, settings in methods.items()]
    arms += [Arm(f"lg-adversary-{w}", against(w), printed["lg-adversary"], seeds=1) for w in ("0.03", "1.0", "30.0")]
    arms += [Arm(f"lg-strong-{w}", (*against(w), *_STRONG), seeds=None if w in ("0.0", "5.0") else 1) for w in weights]
    return Training(
        f"""
[run]
rounds = 20
cohort = 10
eval_every = 2
evaluations = ["global", "local", "ensemble", {{ name = "probe", layer = "fc3" }}]

[data]
source = "adult"
clients = 10
{data}

[model]
name = "lg_adult"

[method]
local_epochs = 1
batch_size = 50
lr = 0.1
""",
        tuple(arms),
        (
            Figure(CORRECT, _local, tolerance=2.0),
            Figure(AUC, summed_up("auc", times=100), tolerance=2.0),
            Figure(ADVERSARY, _adversary, tolerance=3.0),
            Figure(RACE, summed_up("posthoc_auc_0", times=100)),
            Figure(SEX, summed_up("posthoc_auc_1", times=100)),
        ),
        seeds=3,
        picture=_trade_off,
    )


_FAIR = {
    "iid": _adult(
        'partition = "iid"',
        {"fedavg": (83.7, 89.4, 65.5), "lg": (84.3, 89.0, 63.3), "lg-adversary": (82.1, 85.7, 50.1)},
        ("0.0", "0.3", "1.0", "3.0", "5.0", "10.0"),
    ),
    "noniid": _adult(
        'rows = 30000\npartition = { kind = "sorted_shards", shards_per_client = 10 }',
        {"fedavg": (83.7, 88.7, 64.1), "lg": (81.1, 84.4, 62.7), "lg-adversary": (80.1, 84.1, 49.8)},
        ("0.0", "1.0", "3.0", "5.0", "10.0"),
    ),
}

recipes = (
    training_recipe("lg-mnist", "LG-FedAvg, table 1: MNIST", _MNIST, seconds=10_700),
    training_recipe("lg-cifar10", "LG-FedAvg, table 1: CIFAR-10", _CIFAR10, seconds=2_600),
    training_recipe("lg-vqa", "LG-FedAvg, table 1: VQA's place taken by easy-VQA", _VQA, seconds=200),
    training_recipe(
        "lg-rotated-iid", "LG-FedAvg, table 3: a new device, equal clients", _ROTATED["iid"], seconds=6_300
    ),
    training_recipe(
        "lg-rotated-noniid",
        "LG-FedAvg, table 3: a new device, two labels per client",
        _ROTATED["noniid"],
        seconds=6_300,
    ),
    training_recipe("lg-adult-iid", "LG-FedAvg, table 4: fairness, equal clients", _FAIR["iid"], seconds=1_300),
    training_recipe("lg-adult-noniid", "LG-FedAvg, table 4: fairness, unlike clients", _FAIR["noniid"], seconds=1_100),
)
