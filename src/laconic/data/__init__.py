"""The clients' data: datasets, partitions and the federation that they make."""

from laconic.data.adult import adult
from laconic.data.assignment import Assignment, Examples, Ragged
from laconic.data.digits import digits
from laconic.data.dirichlet import dirichlet, dirichlet_per_class, pachinko
from laconic.data.federation import Federation
from laconic.data.frames import from_dataset, from_table, tabular
from laconic.data.newcomer import with_rotated_client
from laconic.data.partition import (
    PartitionSpec,
    assign,
    cmax,
    even,
    groups,
    iid,
    label_shards,
    partitions,
    sorted_shards,
)
from laconic.data.sequences import next_tokens, padded
from laconic.data.sources import (
    cifar10,
    cifar100,
    emnist,
    fashion_mnist,
    femnist,
    gtsrb,
    mnist,
    mnist_by_writer,
    parquet,
    sources,
    svhn,
)
from laconic.data.split import QUANTILES, split_of
from laconic.data.synthetic import linear_teachers, synthetic
from laconic.data.texts import leaf, shakespeare
from laconic.data.validation import with_validation
from laconic.data.vqa import easy_vqa

__all__ = [
    "Assignment",
    "Examples",
    "Federation",
    "PartitionSpec",
    "QUANTILES",
    "Ragged",
    "adult",
    "assign",
    "cifar10",
    "cifar100",
    "cmax",
    "digits",
    "dirichlet",
    "dirichlet_per_class",
    "easy_vqa",
    "emnist",
    "even",
    "fashion_mnist",
    "femnist",
    "groups",
    "from_dataset",
    "from_table",
    "gtsrb",
    "iid",
    "label_shards",
    "leaf",
    "linear_teachers",
    "mnist",
    "mnist_by_writer",
    "next_tokens",
    "pachinko",
    "padded",
    "parquet",
    "partitions",
    "shakespeare",
    "sorted_shards",
    "sources",
    "split_of",
    "svhn",
    "synthetic",
    "tabular",
    "with_rotated_client",
    "with_validation",
]
