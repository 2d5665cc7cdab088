"""Everything that laconic raises on purpose.

::

    LaconicError
    ├── UserError               the caller can mend it; the command line exits with code 2
    │   ├── ConfigError         a setting is unknown, of the wrong type or out of range
    │   ├── DataError           a dataset, a folder or a partition cannot be had as asked
    │   └── RunError            a run directory, a checkpoint or a disk that does not serve
    ├── TooFewReplies           a round that cannot keep what its method promises is abandoned; the run goes on
    └── PayloadError            bytes that are not an honest message (carries `reason`, `client`, `round`)
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable


class LaconicError(Exception):
    """Whatever laconic raises on purpose."""


class UserError(LaconicError):
    """A mistake that the caller can mend: one sentence, no traceback, exit code 2."""


class ConfigError(UserError):
    """A setting is unknown, of the wrong type or out of range."""


class DataError(UserError):
    """A dataset, a folder or a partition cannot be had as asked."""


class RunError(UserError):
    """A run directory, a checkpoint or a disk that does not serve."""


class TooFewReplies(LaconicError):
    """Raised by a `server_update` that cannot keep what it promises with so few replies: the round is abandoned."""


class PayloadError(LaconicError):
    """Bytes that are not an honest message.

    `reason` is a short machine-readable code (`"truncated"`, `"checksum"`, `"non_finite"` …);
    `client` and `round` are filled in by whoever knows them.

    >>> str(PayloadError("checksum", "the frame was altered on its way").at(client=17, round=4))
    'client 17, round 4: the frame was altered on its way [checksum]'
    """

    def __init__(self, reason: str, detail: str, *, client: int | None = None, round: int | None = None) -> None:
        self.reason = reason
        self.detail = detail = printable(detail)
        self.client = client
        self.round = round
        super().__init__(reason, detail)

    def at(self, *, client: int, round: int) -> PayloadError:
        """The same error, saying whose reply it was."""
        return PayloadError(self.reason, self.detail, client=client, round=round)

    def __str__(self) -> str:
        where = "" if self.client is None else f"client {self.client}, round {self.round}: "
        return f"{where}{self.detail} [{self.reason}]"

    def __reduce__(self) -> tuple[object, ...]:
        return (_payload_error, (self.reason, self.detail, self.client, self.round))


def _payload_error(reason: str, detail: str, client: int | None, round: int | None) -> PayloadError:
    return PayloadError(reason, detail, client=client, round=round)


def printable(text: str) -> str:
    r"""What came from elsewhere as a terminal may show it: control characters as escapes, in one line.

    >>> printable("\x1b[2J\ndone")
    '\\x1b[2J\\ndone'
    """
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint to append to "unknown …" sentences, or the whole list where nothing is close.

    >>> did_you_mean("fedavgg", ["fedavg", "fedprox"])
    "did you mean 'fedavg'?"
    >>> did_you_mean("x", ["fedavg", "fedprox"])
    'known: fedavg, fedprox.'
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}."


def not_negative(name: str, value: float) -> None:
    """Refuse a setting that is negative, infinite or no number.

    >>> not_negative("mu", -1.0)
    Traceback (most recent call last):
        ...
    laconic.core.errors.ConfigError: mu must be finite and ≥ 0, got -1.0.
    """
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name} must be finite and ≥ 0, got {value}.")


def one_of(name: str, value: str, known: Collection[str]) -> None:
    """Refuse a setting that is none of the known words.

    >>> one_of("weighting", "equal", ["examples", "uniform"])
    Traceback (most recent call last):
        ...
    laconic.core.errors.ConfigError: unknown weighting 'equal'; known: examples, uniform.
    """
    if value not in known:
        raise ConfigError(f"unknown {name} {value!r}; {did_you_mean(str(value), known)}")
