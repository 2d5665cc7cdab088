"""What the papers' methods are compared with: federated averaging on real data, and codecs on the way up."""

from __future__ import annotations

from laconic.reproduce.training import (
    Arm,
    Figure,
    Training,
    byte_share,
    front,
    last_evaluations,
    summed_up,
    training_recipe,
)

ACCURACY, LAST, LOCAL = "accuracy, mean of the last ten, %", "accuracy at the end, %", "local accuracy, %"
BITS, BITS_DOWN, SHARE = "bits per parameter up", "bits per parameter down", "bytes both ways, % of the first"

_EM = Training(
    """
[run]
rounds = 400
cohort = 10
eval_every = 10

[data]
clients = 100

[method]
local_epochs = 1

[link]
up = "float32"
down = "float32"
""",
    (
        Arm(
            "mnist-fedavg",
            (
                "data.source=mnist",
                'data.partition={ kind = "label_shards", shards_per_client = 2 }',
                "model.name=lg_mlp",
                "method.name=fedavg",
                "method.batch_size=10",
                "method.lr=0.1",
                "method.momentum=0.5",
                "method.clip_norm=5.0",
            ),
            {LAST: 98.15},  # LG-FedAvg, table 1, after 725 rounds
        ),
        Arm(
            "cifar10-fedadam",
            (
                "data.source=cifar10",
                'data.partition={ kind = "dirichlet", alpha = 1.0 }',
                "model.name=lenet5_fs",
                "method.name=fedopt",
                'method.server={ name = "adam", lr = 0.001 }',
                "method.batch_size=64",
                "method.lr=0.05",
            ),
            {LAST: 69.97},  # FedSparse, table 1, after 1,000 rounds
        ),
    ),
    (
        Figure(LAST, summed_up("global_accuracy", times=100), tolerance=2.0),
        Figure(ACCURACY, last_evaluations),
        Figure(LOCAL, summed_up("local_accuracy", times=100)),
    ),
)

_BOTH_WAYS = {
    "float32": ("float32", "float32"),
    "eden-4": ("eden:bits=4", "eden:bits=4"),
    "eden-2": ("eden:bits=2", "eden:bits=2"),
    "eden-1": ("eden:bits=1", "eden:bits=1"),
    "eden-0.5": ("eden:bits=0.5", "eden:bits=0.5"),
    "qsgd": ("qsgd:levels=128", "qsgd:levels=128"),
    "terngrad": ("terngrad", "terngrad"),
    "ef-signsgd": ("ef(signsgd)", "signsgd"),
    "signsgd": ("signsgd", "signsgd"),
    "ef-topk": ("ef(topk:fraction=0.01)", "topk:fraction=0.01"),
}
_CODECS = Training(
    """
[run]
rounds = 400
cohort = 10
eval_every = 10

[data]
source = "cifar10"
clients = 100
partition = { kind = "dirichlet", alpha = 1.0 }

[model]
name = "lg_cnn"

[method]
name = "fedavg"
local_epochs = 1
batch_size = 50
lr = 0.1
""",
    tuple(Arm(name, (f"link.up={up}", f"link.down={down}")) for name, (up, down) in _BOTH_WAYS.items()),
    (
        Figure(ACCURACY, last_evaluations),
        Figure(LOCAL, summed_up("local_accuracy", times=100)),
        Figure(BITS, summed_up("bits_per_parameter_up")),
        Figure(BITS_DOWN, summed_up("bits_per_parameter_down")),
        Figure(SHARE, byte_share),
    ),
    seeds=3,
    picture=front,
)

_LENET = """
[run]
rounds = 300
cohort = 10
eval_every = 10
precision = "bfloat16"
evaluations = ["global"]

[data]
SOURCE

[model]
name = "lenet5_fs"
init = "glorot:gain=0.7"
dropout = true

[method]
server = { name = "adam", lr = 0.001 }
local_epochs = 1
batch_size = BATCH
lr = 0.05
"""
_EDEN = {bits: (f"link.up=eden:bits={bits}", f"link.down=eden:bits={bits}") for bits in (1, 2)}


def _two_ways(source: str, *, batch: int, lambda0: float, seeds: int) -> Training:
    """FedAdam and FedSparse `mid` with few bits both ways, and FedAdam with 32 beside them."""
    adam, sparse = ("method.name=fedopt",), ("method.name=fedsparse", f"method.lambda0={lambda0!r}")
    return Training(
        _LENET.replace("SOURCE", source).replace("BATCH", str(batch)),
        (
            Arm("fedavg", adam),
            Arm("fedavg-eden-1", (*adam, *_EDEN[1])),
            Arm("fedavg-eden-2", (*adam, *_EDEN[2])),
            Arm("fedsparse-eden-2", (*sparse, *_EDEN[2])),
            Arm("fedsparse-eden-1", (*sparse, *_EDEN[1])),
        ),
        (
            Figure(ACCURACY, last_evaluations),
            Figure(SHARE, byte_share),
            Figure(BITS, summed_up("bits_per_parameter_up")),
            Figure(BITS_DOWN, summed_up("bits_per_parameter_down")),
        ),
        seeds=seeds,
        picture=front,
    )


_TWO_WAYS = _two_ways(
    'source = "cifar10"\nclients = 100\npartition = { kind = "dirichlet", alpha = 1.0 }',
    batch=64,
    lambda0=5e-7,
    seeds=3,
)
_WRITERS = _two_ways('source = "mnist_by_writer"', batch=20, lambda0=7.8e-7, seeds=1)

_DATASETS = {
    "mnist": ("data.source=mnist", "model.name=lenet5", "method.batch_size=20"),
    "cifar10": ("data.source=cifar10", "model.name=lenet5_fs", "method.batch_size=64"),
}
_PRECISION = Training(
    """
[run]
rounds = 150
cohort = 10
eval_every = 5
evaluations = ["global"]

[data]
clients = 100
partition = { kind = "dirichlet", alpha = 1.0 }

[method]
name = "fedavg"
local_epochs = 1
lr = 0.05
""",
    tuple(
        Arm(f"{source}-{precision}", (*settings, f"run.precision={precision}"))
        for source, settings in _DATASETS.items()
        for precision in ("float32", "bfloat16")
    ),
    (Figure(ACCURACY, last_evaluations), Figure(LAST, summed_up("global_accuracy", times=100))),
    seeds=3,
)

recipes = (
    training_recipe("em", "FedAvg and FedAdam as LG-FedAvg's and FedSparse's tables 1 have them", _EM, seconds=2_600),
    training_recipe("codecs", "Ten codecs both ways, CIFAR-10: accuracy against bytes", _CODECS, seconds=7_000),
    training_recipe("two-ways", "EDEN both ways under FedAdam and FedSparse, CIFAR-10", _TWO_WAYS, seconds=5_000),
    training_recipe("two-ways-writers", "The same by writers, 836 clients", _WRITERS, seconds=2_000),
    training_recipe("precision", "bfloat16 against float32 on MNIST and CIFAR-10", _PRECISION, seconds=2_400),
)
