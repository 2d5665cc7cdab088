"""Who takes part in a run: how many clients there are, how many a round has, and who joins later."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.core.errors import ConfigError
from laconic.core.random import Key


@dataclass(frozen=True)
class Newcomer:
    """The last client joins late: until round `after` it sits out, then every round has it and `others` of the rest."""

    after: int
    others: int = 0

    def __post_init__(self) -> None:
        if self.after < 0 or self.others < 0:
            raise ConfigError(f"a newcomer's after and others must not be negative, got {self.after}, {self.others}.")


@dataclass(frozen=True)
class Population:
    """`clients` clients, of whom `cohort` take part in a round.

    >>> population = Population(5, 4, Newcomer(after=3))
    >>> population.cohort_of(Key.from_seed(0), round=3), population.cohort_of(Key.from_seed(0), round=4)
    ([0, 1, 2, 3], [4])
    """

    clients: int
    cohort: int
    newcomer: Newcomer | None = None

    def __post_init__(self) -> None:
        if self.cohort > len(self.settled):
            raise ConfigError(
                f"run.cohort is {self.cohort}, but there are only {len(self.settled)} clients; "
                "lower run.cohort or raise data.clients."
            )
        if self.newcomer is not None and self.newcomer.others > len(self.settled):
            raise ConfigError(
                f"newcomer.others is {self.newcomer.others}, but there are only {len(self.settled)} others."
            )

    @property
    def settled(self) -> range:
        """The clients that are there from the beginning."""
        return range(self.clients - (self.newcomer is not None))

    @property
    def most(self) -> int:
        """The size of the largest cohort."""
        return self.cohort if self.newcomer is None else max(self.cohort, self.newcomer.others + 1)

    def cohort_of(self, key: Key, *, round: int) -> list[int]:
        """Who takes part in a round, in ascending order: the order of the fold."""
        old = len(self.settled)
        if self.newcomer is None or round <= self.newcomer.after:
            return sample_cohort(key, clients=old, cohort=self.cohort)
        return [*sample_cohort(key, clients=old, cohort=self.newcomer.others), old]


ALONE = Population(1, 1)
"""One client: what a method is bound to where nobody says."""


def sample_cohort(key: Key, *, clients: int, cohort: int) -> list[int]:
    """`cohort` of `clients`, uniform without replacement, in ascending order.

    >>> sample_cohort(Key.from_seed(0), clients=5, cohort=5)
    [0, 1, 2, 3, 4]
    """
    if cohort == clients:
        return list(range(clients))
    return sorted(
        int(i) for i in key.fold_in("cohort").numpy().choice(clients, size=cohort, replace=False, shuffle=False)
    )
