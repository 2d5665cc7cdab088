"""Who takes part in a round."""

from __future__ import annotations

from laconic.core import Key


def sample_cohort(key: Key, *, clients: int, cohort: int) -> list[int]:
    """`cohort` of `clients`, uniform without replacement, in ascending order: the order of the fold.

    >>> sample_cohort(Key.from_seed(0), clients=5, cohort=5)
    [0, 1, 2, 3, 4]
    """
    if cohort == clients:
        return list(range(clients))
    return sorted(
        int(i) for i in key.fold_in("cohort").numpy().choice(clients, size=cohort, replace=False, shuffle=False)
    )
