"""Label skew drawn from Dirichlet distributions: by client, by class, and over a tree of labels."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from laconic.core import DataError, Key
from laconic.data.assignment import Assignment, Examples, IntArray, Ragged, deal, even_sizes, proportional

FloatArray = NDArray[np.float64]


def dirichlet(
    examples: Examples,
    clients: int,
    key: Key,
    *,
    alpha: float = 1.0,
    concentration: Literal["per_class", "total"] = "per_class",
    per_client: int | None = None,
) -> Assignment:
    r"""Every client draws its own mix of classes, $q_i \sim \mathrm{Dir}(\alpha p)$ (Hsu et al., 2019).

    `p` is the mix of the whole training set. Its scale is a matter of convention, and figures depend on it: with
    `per_class`, what most libraries do, p averages 1 over the classes (for balanced classes, Dir(α, …, α)); with
    `total` it sums to 1, so that a client of ten balanced classes draws from Dir(α/10, …, α/10).

    All clients get the same number of examples (`per_client`, or all there are), drawn class by class from `q_i`
    without replacement; a class that has run out is struck from the mixes of the clients that follow. The test set
    is divided by the same `q_i`.

    A large `alpha` makes all clients alike, a small one gives each a single class.

    >>> examples = Examples(np.arange(600) % 3, num_train=300, classes=3)
    >>> dealt = dirichlet(examples, 10, Key.from_seed(0), alpha=0.1)
    >>> dealt.train.sizes.tolist() == dealt.test.sizes.tolist() == [30] * 10
    True
    """
    need_classes(examples, "dirichlet")
    need_positive(alpha, "dirichlet", "alpha")
    quotas = _quotas(examples.num_train, clients, per_client, "dirichlet")
    rng = key.fold_in("dirichlet").numpy()
    stock = examples.train_stock()
    present = stock > 0
    mix = np.zeros((clients, examples.classes))
    prior = stock[present] / stock.sum() * (present.sum() if concentration == "per_class" else 1)
    mix[:, present] = rng.dirichlet(alpha * prior, size=clients)
    train = deal(_fill(mix, quotas, stock, rng), examples.train_labels, rng)
    test = deal(
        _fill(mix, even_sizes(examples.num_test, clients), examples.test_stock(), rng),
        examples.test_labels,
        rng,
        start=examples.num_train,
    )
    return Assignment(train, test, examples.num_train - len(train.flat))


def dirichlet_per_class(
    examples: Examples,
    clients: int,
    key: Key,
    *,
    alpha: float = 1.0,
    min_size: int = 1,
    cap: bool = True,
    tries: int = 1000,
) -> Assignment:
    r"""Every class is divided among the clients by its own draw from $\mathrm{Dir}(\alpha)$; sizes are unequal.

    Drawn anew until every client has `min_size` examples, `tries` times at most. With `cap`, a client that has
    its even share already gets nothing of the classes that follow. The test set is divided in the same shares.

    >>> examples = Examples(np.arange(600) % 3, num_train=300, classes=3)
    >>> dealt = dirichlet_per_class(examples, 4, Key.from_seed(0), alpha=0.5, min_size=10)
    >>> int(dealt.train.sizes.sum()), int(dealt.train.sizes.min()) >= 10
    (300, True)
    """
    need_classes(examples, "dirichlet_per_class")
    need_positive(alpha, "dirichlet_per_class", "alpha")
    if min_size * clients > examples.num_train:
        raise DataError(
            f"partition 'dirichlet_per_class': {clients} clients of at least {min_size} examples need "
            f"{min_size * clients}, but there are {examples.num_train}; lower min_size or clients."
        )
    rng = key.fold_in("dirichlet_per_class").numpy()
    stock = examples.train_stock()
    for _ in range(max(tries, 1)):
        counts = _divide_classes(stock, clients, alpha, rng, cap=cap)
        if counts.sum(axis=1).min() >= max(min_size, 1):
            break
    else:
        raise DataError(
            f"partition 'dirichlet_per_class': no draw in {tries} gave all {clients} clients "
            f"{max(min_size, 1)} examples at alpha = {alpha:g}; raise alpha, or lower min_size or clients."
        )
    train = deal(counts, examples.train_labels, rng)
    test = deal(proportional(counts, examples.test_stock()), examples.test_labels, rng, start=examples.num_train)
    return Assignment(train, test)


def pachinko(
    examples: Examples,
    clients: int,
    key: Key,
    *,
    coarse_alpha: float = 0.1,
    fine_alpha: float = 10.0,
    per_client: int | None = None,
    test_fraction: float = 0.2,
) -> Assignment:
    """Every client draws a mix of coarse labels and, within each, one of its fine labels (Reddi et al., 2021).

    Examples are drawn coarse label first, then fine label, without replacement; what has run out is struck. Of
    each client's rows, `test_fraction` become its own test set (the published protocol has separate test
    clients, who could not be asked about personal models); 0 divides the test split by the same mixes instead.

    >>> examples = Examples(np.arange(800) % 8, num_train=800, classes=8, coarse=np.arange(8) // 2)
    >>> dealt = pachinko(examples, 10, Key.from_seed(0))
    >>> dealt.train.sizes.tolist() == [64] * 10, dealt.test.sizes.tolist() == [16] * 10
    (True, True)
    """
    need_classes(examples, "pachinko")
    need_positive(coarse_alpha, "pachinko", "coarse_alpha")
    need_positive(fine_alpha, "pachinko", "fine_alpha")
    if not 0 <= test_fraction < 1:
        raise DataError(f"partition 'pachinko': test_fraction must be at least 0 and below 1, got {test_fraction}.")
    if examples.coarse is None:
        raise DataError(
            "partition 'pachinko' needs coarse labels, which this dataset does not have; "
            "use cifar100, or give `coarse` with your own arrays."
        )
    quotas = _quotas(examples.num_train, clients, per_client, "pachinko")
    rng = key.fold_in("pachinko").numpy()
    num_coarse = int(examples.coarse.max()) + 1
    coarse_mix = rng.dirichlet(np.full(num_coarse, coarse_alpha), size=clients)
    # Gamma draws are Dirichlet draws before they are normalised, which filling does anyway.
    fine_mix = rng.standard_gamma(fine_alpha, size=(clients, examples.classes))
    trees = (coarse_mix, fine_mix, examples.coarse)
    train = deal(_fill_tree(*trees, quotas, examples.train_stock(), rng), examples.train_labels, rng)
    dropped = examples.num_train - len(train.flat)
    if test_fraction > 0:
        train, test = _hold_out(train, test_fraction, rng)
    else:
        counts = _fill_tree(*trees, even_sizes(examples.num_test, clients), examples.test_stock(), rng)
        test = deal(counts, examples.test_labels, rng, start=examples.num_train)
    return Assignment(train, test, dropped)


def need_classes(examples: Examples, name: str) -> None:
    """Refuse a partition by label where the targets are no labels."""
    if examples.classes == 0:
        raise DataError(
            f"partition {name!r} needs class labels, but this is regression; use 'iid', 'even' or 'groups'."
        )


def need_positive(value: float, name: str, setting: str) -> None:
    """Refuse a concentration that is not positive and finite."""
    if not (value > 0 and np.isfinite(value)):
        raise DataError(f"partition {name!r}: {setting} must be positive and finite, got {value}.")


def _quotas(total: int, clients: int, per_client: int | None, name: str) -> IntArray:
    if per_client is None:
        return even_sizes(total, clients)
    if not 1 <= per_client * clients <= total:
        raise DataError(
            f"partition {name!r}: {clients} clients of {per_client} examples cannot be had from {total}; "
            f"per_client may be 1 to {total // clients}."
        )
    return np.full(clients, per_client, dtype=np.int64)


def _fill(mix: FloatArray, quotas: IntArray, stock: IntArray, rng: np.random.Generator) -> IntArray:
    """Draw each client's counts by class, striking classes as they run out.

    Drawing a client's whole quota at once and drawing anew what exceeds the stock has the same distribution as
    drawing one example after the other, and is a thousand times faster.
    """
    left = stock.copy()
    counts = np.zeros(mix.shape, dtype=np.int64)
    for client, quota in enumerate(quotas.tolist()):
        while quota > 0:
            taken = np.minimum(rng.multinomial(quota, _open_mix(mix[client], left)), left)
            counts[client] += taken
            left -= taken
            quota -= int(taken.sum())
    return counts


def _fill_tree(
    coarse_mix: FloatArray,
    fine_mix: FloatArray,
    coarse: IntArray,
    quotas: IntArray,
    stock: IntArray,
    rng: np.random.Generator,
) -> IntArray:
    left = stock.copy()
    num_coarse = coarse_mix.shape[1]
    members = [np.flatnonzero(coarse == label) for label in range(num_coarse)]
    coarse_left = np.array([left[fine].sum() for fine in members], dtype=np.int64)
    counts = np.zeros(fine_mix.shape, dtype=np.int64)
    for client, quota in enumerate(quotas.tolist()):
        while quota > 0:
            drawn = rng.multinomial(quota, _open_mix(coarse_mix[client], coarse_left))
            drawn = np.minimum(drawn, coarse_left)
            coarse_left -= drawn
            quota -= int(drawn.sum())
            for label in np.flatnonzero(drawn):
                fine = members[label]
                wanted = int(drawn[label])
                while wanted > 0:
                    taken = rng.multinomial(wanted, _open_mix(fine_mix[client, fine], left[fine]))
                    taken = np.minimum(taken, left[fine])
                    counts[client, fine] += taken
                    left[fine] -= taken
                    wanted -= int(taken.sum())
    return counts


def _open_mix(mix: FloatArray, left: IntArray) -> FloatArray:
    open_ = np.where(left > 0, mix, 0.0)
    total = open_.sum()
    if total <= 0:  # all that the client wants has run out: whatever is left, as it lies
        return np.asarray(left / left.sum())
    return np.asarray(open_ / total)


def _divide_classes(stock: IntArray, clients: int, alpha: float, rng: np.random.Generator, *, cap: bool) -> IntArray:
    counts = np.zeros((clients, len(stock)), dtype=np.int64)
    fair = stock.sum() / clients
    for label in np.flatnonzero(stock):
        share = rng.dirichlet(np.full(clients, alpha))
        if cap:
            still = counts.sum(axis=1) < fair
            share = share * still if (share * still).sum() > 0 else still.astype(np.float64)
        edges = np.rint(np.cumsum(share / share.sum()) * stock[label]).astype(np.int64)
        counts[:, label] = np.diff(edges, prepend=0)
    return counts


def _hold_out(train: Ragged, fraction: float, rng: np.random.Generator) -> tuple[Ragged, Ragged]:
    """Part of every client's rows, chosen at random; at least one stays for training."""
    sizes = train.sizes
    owner = train.owner
    order = np.lexsort((rng.random(len(owner)), owner))
    rank = np.arange(len(owner)) - np.repeat(train.offsets[:-1], sizes)
    held = np.minimum(np.rint(fraction * sizes).astype(np.int64), np.maximum(sizes - 1, 0))
    is_test = rank < np.repeat(held, sizes)
    rows = train.flat[order]
    clients = len(train)

    def part(chosen: NDArray[np.bool_]) -> Ragged:
        offsets = np.concatenate([[0], np.cumsum(np.bincount(owner[chosen], minlength=clients))])
        return Ragged(rows[chosen], offsets.astype(np.int64))

    return part(~is_test), part(is_test)
