"""What a command line names: methods of the catalogue and TOML files.

::

    fedavg                           a method with its own defaults
    fedprox:mu=0.1,lr=0.05           ... and settings
    fedavg@eden:bits=2               ... and a codec on the way up
    digits.toml                      a run, or with a [sweep] several
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from laconic.config import Table, overridden, read_table, read_tables, sections, toml_value
from laconic.core import ConfigError


def read_entries(
    words: Iterable[str], *, base: Path | None = None, overrides: Iterable[str] = ()
) -> list[tuple[str, Table]]:
    """The runs that the words name. Methods are run under the conditions of the file `base`; overrides hold for all.

    >>> [(name, table["method"], table["link"]) for name, table in read_entries(["fedprox:mu=0.1@drive"])]
    [('fedprox:mu=0.1@drive', {'name': 'fedprox', 'mu': 0.1}, {'up': 'drive'})]
    """
    changes = list(overrides)
    conditions = sections({}, where="compare") if base is None else read_table(base)
    entries: list[tuple[str, Table]] = []
    for word in words:
        if word.endswith(".toml") or Path(word).is_file():
            entries += read_tables(Path(word), changes)
        else:
            table = {**copy.deepcopy(conditions), **_method(word)}
            if "@" in word:
                table["link"] = {**table["link"], "up": word.partition("@")[2].strip()}
            entries.append((word, sections(overridden(table, changes), where=f"compare {word}")))
    return entries


def _method(word: str) -> dict[str, Any]:
    name, _, settings = word.partition("@")[0].partition(":")
    found: dict[str, Any] = {"name": name.strip()}
    # A comma between values of a list is followed by no key.
    for pair in re.split(r",(?=\s*\w+\s*=)", settings) if settings.strip() else []:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ConfigError(f"compare {word}: settings are written key=value, got {pair.strip()!r}.")
        found[key.strip()] = toml_value(value)
    return {"method": found}
