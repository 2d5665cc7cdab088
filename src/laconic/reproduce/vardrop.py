"""Variational dropout: accuracy, sparsity, communication and the number of devices (Du et al., 2018).

The rows are those with random first weights. A round is one iteration: 117 are an epoch of MNIST's 60,000 images on
four devices with batches of 128. The paper's T, learning rate and warm-up are not stated.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from laconic.report import RunRecord
from laconic.reproduce.training import Arm, Figure, Training, paper_share, summed_up, training_recipe

ACCURACY, LEFT, SENT = "accuracy at the end, %", "weights left, %", "communication, % of dense"
VOLUME = "GiB of one device"


def _one_device(run: RunRecord, _: RunRecord | None) -> float | None:
    summary = run.summary or {}
    return float(summary["paper_bytes"] / summary["clients"] / 2**30) if "paper_bytes" in summary else None


def _sent(run: RunRecord, first: RunRecord | None) -> float | None:
    """What one device sends and gets in an iteration, in per cent of a device of the dense arm."""
    share = paper_share(run, first)
    if not share or first is None or run.summary is None or first.summary is None:
        return None
    return float(share * first.summary["clients"] / run.summary["clients"])


FIGURES = (
    Figure(ACCURACY, summed_up("global_accuracy", times=100), tolerance=1.0),
    Figure(LEFT, summed_up("nonzero", times=100), tolerance=2.0),
    Figure(SENT, _sent, tolerance=3.0),
    Figure(VOLUME, _one_device, tolerance=1.0),
)
_BATCH = 128


def _training(
    source: str,
    model: str,
    *,
    examples: int,
    epochs: int,
    dense: tuple[float, float],
    sparse: tuple[float, float, float],
    devices: Mapping[int, int] = MappingProxyType({4: 0}),
    small: tuple[str, ...] = (),
    scale: float = 1.0,
) -> Training:
    """`dense`: accuracy and volume; `sparse`: accuracy, weights left and communication with four devices.

    `devices` are numbers of devices, each with the epochs that it has below full scale.
    """

    def conditions(count: int) -> tuple[str, ...]:
        epoch = examples // count // _BATCH
        sizes = (f"data.clients={count}", f"run.cohort={count}", f"run.eval_every={epoch}")
        return (*sizes, f"run.rounds={epochs * epoch}")

    def arm(count: int) -> Arm:
        rounds = examples // count // _BATCH * devices[count]
        number = epochs * (examples // count // _BATCH)
        own = (*conditions(count), "method.name=vardrop", "method.lr=0.002", f"method.decay_rounds={number}")
        noise = ("method.first_log_sigma2=-8.0", "method.sigma_lr=10.0", "method.vote=0.5")
        prior = ("method.kl_size=federation", "method.kl_scale=1.5")
        printed = dict(zip((ACCURACY, LEFT, SENT), sparse, strict=True)) if count == 4 else {}
        fewer = (f"run.rounds={rounds}", f"method.decay_rounds={rounds}") if small else ()
        return Arm(f"devices-{count}", (*own, *noise, *prior), printed, small=fewer)

    # One local step of SGD with rate 1 makes the difference minus the gradient, and the server's Adam takes the step.
    steps = (
        "method.name=fedopt",
        'method.server={ name = "adam", lr = 0.001 }',
        "method.lr=1.0",
        "method.local_steps=1",
    )
    whole = examples // 4 // _BATCH * 10
    return Training(
        f"""
[run]
evaluations = ["global"]

[data]
source = "{source}"
partition = "iid"

[model]
name = "{model}"

[method]
batch_size = {_BATCH}
""",
        (
            Arm(
                "dense",
                (*conditions(4), *steps, "link.up=float32", "link.down=float32"),
                {ACCURACY: dense[0], VOLUME: dense[1]},
                small=(f"run.rounds={whole}",) if small else (),
            ),
            *map(arm, devices),
        ),
        FIGURES,
        small=small,
        scale=scale,
    )


_LENET = ("model.name=lenet5",)  # 431,080 parameters in the place of CifarNet's 1,296,074
_MNIST = _training(
    "mnist",
    "cifarnet",
    examples=60_000,
    epochs=10,
    dense=(99.48, 11.5),
    sparse=(98.35, 1.9, 11.6),
    devices={4: 18, 8: 16, 16: 12},
    small=_LENET,
    scale=0.3,
)
_FASHION = _training(
    "fashion_mnist",
    "cifarnet",
    examples=60_000,
    epochs=30,
    dense=(91.60, 34.5),
    sparse=(89.46, 4.3, 12.1),
    devices={4: 14},
    small=_LENET,
    scale=0.3,
)
_CIFAR10 = _training("cifar10", "resnet18", examples=50_000, epochs=35, dense=(93.57, 297.5), sparse=(90.32, 2.4, 11.4))
_GTSRB = _training("gtsrb", "resnet18", examples=39_209, epochs=30, dense=(98.42, 200.3), sparse=(96.31, 1.1, 7.3))
_SVHN = _training("svhn", "vgg_like", examples=73_257, epochs=35, dense=(95.30, 702.2), sparse=(92.19, 1.3, 7.0))

recipes = (
    training_recipe(
        "vardrop-mnist",
        "Variational dropout, tables 1 and 2 and figure 2: MNIST, 4 to 16 devices",
        _MNIST,
        seconds=4_000,
    ),
    training_recipe("vardrop-fashion", "Variational dropout, tables 1 and 2: Fashion-MNIST", _FASHION, seconds=2_000),
    training_recipe("vardrop-cifar10", "Variational dropout, tables 1 and 2: CIFAR-10", _CIFAR10, seconds=25_000),
    training_recipe("vardrop-gtsrb", "Variational dropout, tables 1 and 2: GTSRB", _GTSRB, seconds=17_000),
    training_recipe("vardrop-svhn", "Variational dropout, tables 1 and 2: SVHN", _SVHN, seconds=310_000),
)
