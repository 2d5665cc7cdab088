"""FedPM, tables 1 and 3 and its models' sizes: accuracy and bits per parameter of masks (Isik et al., 2023).

Frames are coded with what both ends know, which the paper does not do: its own rate, by one frequency for the whole
mask, is `bits by one frequency`. Its 0.885 bits for DRIVE and EDEN cannot come from signs that are balanced.
"""

from __future__ import annotations

import statistics

from laconic.report import RunRecord
from laconic.reproduce.training import Arm, Figure, Training, last_evaluations, summed_up, training_recipe

ACCURACY, BITS, ONE = "accuracy, mean of the last ten, %", "bits per parameter up", "bits by one frequency"
MODEL = "bits per parameter of the model"


def _one_frequency(run: RunRecord, _: RunRecord | None) -> float | None:
    """What the paper counts for a mask, the mean over rounds."""
    rates = [record.clients["mask_entropy"] for record in run.history if record.clients.get("mask_entropy") is not None]
    return statistics.fmean(rates) if rates else None


FIGURES = (
    Figure(ACCURACY, last_evaluations, tolerance=2.0),
    Figure(BITS, summed_up("bits_per_parameter_up"), tolerance=0.05),
    Figure(ONE, _one_frequency, tolerance=0.05),
    Figure(MODEL, summed_up("model_bits_per_parameter"), tolerance=0.03),  # a mask of as many ones as zeros has 1
)
_MASK = ("method.name=fedpm",)
_DENSE = ("method.name=fedavg", "method.lr=0.1")
_COMMON = """
[run]
eval_every = 2

[data]
normalize = "symmetric"

[method]
local_epochs = 3
batch_size = 128
"""

# --- tables 1 and 3: CIFAR-10, at most c_max classes per client, a share ρ of them in a round -------------------------

_CLIENTS = {"1": (10, 10, 1), "0.5": (10, 5, 3), "0.1": (50, 5, 10)}  # clients, cohort, rounds until counts begin anew
_ACCURACIES = {
    4: {
        "drive": (73.9, 63.2, 40.5),
        "eden": (71.7, 66.5, 36.0),
        "qsgd": (70.9, 64.4, 39.9),
        "fedmask": (53.1, 43.5, 36.2),
        "fedpm": (74.8, 72.0, 49.6),
    },
    2: {
        "drive": (43.4, 37.6, 22.1),
        "eden": (53.5, 46.1, 21.9),
        "qsgd": (47.6, 46.4, 24.3),
        "fedmask": (42.0, 38.7, 19.7),
        "fedpm": (64.3, 55.6, 27.7),
    },
}
_RATES = {
    4: {"drive": (0.885,) * 3, "eden": (0.885,) * 3, "qsgd": (0.982, 0.923, 0.91), "fedpm": (0.863, 0.912, 0.996)},
    2: {"drive": (0.885,) * 3, "eden": (0.885,) * 3, "qsgd": (1.23, 1.234, 1.082), "fedpm": (0.868, 0.904, 0.997)},
}
_METHODS = {
    "fedpm": _MASK,
    "fedmask": ("method.name=fedmask",),
    "drive": (*_DENSE, "link.up=drive"),
    "eden": (*_DENSE, "link.up=eden:bits=1"),
    "qsgd": (*_DENSE, "link.up=qsgd:levels=512"),
}


# Below full scale: a quarter of the channels, half of the data, half the batches, so that a client takes as many steps.
_SMALL = ("model.width=0.25", "data.limit=25000", "method.batch_size=64")
# A narrow network passes on little but the noise of its masks unless the first ones are decided; the paper's rate of
# QSGD takes fewer levels where there are fewer parameters.
_NARROW = {"fedpm": ("method.spread=4.0",), "qsgd": ("link.up=qsgd:levels=128",)}


def _unlike(c_max: int) -> Training:
    arms = []
    for place, (share, (clients, cohort, reset)) in enumerate(_CLIENTS.items()):
        for name, settings in _METHODS.items():
            own: tuple[str, ...] = ()
            if name == "fedpm":
                own = (f"method.reset={reset}",)
                if (c_max, share) == (2, "0.1"):
                    own = (*own, "method.evaluate=sample")  # the paper's one exception
            rate = (1.0,) * 3 if name == "fedmask" else _RATES[c_max][name]
            paper = {ACCURACY: _ACCURACIES[c_max][name][place]}
            paper[ONE if name in ("fedpm", "fedmask") else BITS] = rate[place]
            arms.append(
                Arm(
                    f"{name}-{share}",
                    (f"data.clients={clients}", f"run.cohort={cohort}", *settings, *own),
                    paper,
                    small=_NARROW.get(name, ()),
                )
            )
    setting = f'source = "cifar10"\npartition = {{ kind = "cmax", c_max = {c_max} }}'
    common = _COMMON.replace("[data]", f"[data]\n{setting}").replace("[run]", "[run]\nrounds = 200")
    return Training(f'{common}\n[model]\nname = "conv6"\n', tuple(arms), FIGURES, scale=0.3, small=_SMALL)


# --- clients that are alike: sizes of models, and rates ---------------------------------------------------------------


def _alike(source: str, model: str, *, rounds: int, bits: float) -> Training:
    setting = f'source = "{source}"\nclients = 10\npartition = {{ kind = "iid" }}'
    common = _COMMON.replace("[data]", f"[data]\n{setting}").replace("[run]", f"[run]\nrounds = {rounds}\ncohort = 10")
    arms = (
        Arm("fedpm", _MASK, {MODEL: bits}),
        Arm("fedmask", ("method.name=fedmask", "method.scale=e")),
        Arm("eden", (*_DENSE, "link.up=eden:bits=1")),
        Arm("qsgd", (*_DENSE, "link.up=qsgd:levels=128")),
        Arm("signsgd", (*_DENSE, "link.up=signsgd")),
        Arm("drive", (*_DENSE, "link.up=drive")),
        Arm("terngrad", (*_DENSE, "link.up=terngrad")),
    )
    small = ("model.width=0.25",)
    return Training(f'{common}\n[model]\nname = "{model}"\n', arms, FIGURES, scale=15 / rounds, small=small)


_MRC = Training(
    _alike("mnist", "conv4", rounds=30, bits=0.96).common.replace("[run]", '[run]\nprecision = "bfloat16"')
    + "width = 0.25\n",
    (
        Arm("mask", _MASK),
        Arm("mrc-3", (*_MASK, "link.up=mrc:kl=3")),
        Arm("mrc-5", (*_MASK, "link.up=mrc")),
        Arm("mrc-12", (*_MASK, "link.up=mrc:kl=12")),
        Arm("fedavg", _DENSE),
    ),
    FIGURES[:2],
)
_RESET = Training(
    _unlike(4).common,
    tuple(
        Arm(
            f"reset-{reset}",
            ("data.clients=50", "run.cohort=5", *_MASK, f"method.reset={reset}"),
            small=_NARROW["fedpm"],
        )
        for reset in (10, 1)
    ),
    FIGURES,
    scale=0.3,
    small=_SMALL,
)

recipes = (
    training_recipe(
        "fedpm-cmax4", "FedPM, tables 1 and 3: CIFAR-10, four classes per client", _unlike(4), seconds=46_000
    ),
    training_recipe(
        "fedpm-cmax2", "FedPM, tables 1 and 3: CIFAR-10, two classes per client", _unlike(2), seconds=46_000
    ),
    training_recipe("fedpm-reset", "FedPM: counts that begin anew, a tenth of the clients", _RESET, seconds=1200),
    training_recipe(
        "fedpm-mrc", "FedPM, equal clients: MNIST, masks drawn by minimal random coding", _MRC, seconds=15_000
    ),
    training_recipe(
        "fedpm-mnist", "FedPM, equal clients: MNIST", _alike("mnist", "conv4", rounds=200, bits=0.96), seconds=8_200
    ),
    training_recipe(
        "fedpm-emnist", "FedPM, equal clients: EMNIST", _alike("emnist", "conv4", rounds=200, bits=0.83), seconds=15_000
    ),
    training_recipe(
        "fedpm-cifar10",
        "FedPM, equal clients: CIFAR-10",
        _alike("cifar10", "conv6", rounds=200, bits=0.80),
        seconds=14_000,
    ),
    training_recipe(
        "fedpm-cifar100",
        "FedPM, equal clients: CIFAR-100",
        _alike("cifar100", "conv10", rounds=400, bits=0.85),
        seconds=25_000,
    ),
)
