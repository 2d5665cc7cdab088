"""Who takes part in a round."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.core import ConfigError, Key


@dataclass(frozen=True)
class Newcomer:
    """The last client joins late: until round `after` it sits out, then every round has it and `others` of the rest.

    >>> newcomer = Newcomer(after=3, others=0)
    >>> newcomer.cohort(Key.from_seed(0), round=3, clients=5, cohort=4), newcomer.cohort(
    ...     Key.from_seed(0), round=4, clients=5, cohort=4)
    ([0, 1, 2, 3], [4])
    """

    after: int
    others: int = 0

    def __post_init__(self) -> None:
        if self.after < 0 or self.others < 0:
            raise ConfigError(f"a newcomer's after and others must not be negative, got {self.after}, {self.others}.")

    def cohort(self, key: Key, *, round: int, clients: int, cohort: int) -> list[int]:
        """The clients of a round, in ascending order."""
        old = clients - 1
        if round <= self.after:
            return sample_cohort(key, clients=old, cohort=cohort)
        return [*sample_cohort(key, clients=old, cohort=self.others), old]


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
