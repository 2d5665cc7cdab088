"""How examples and labels are dealt to clients, in few numbers: what a run leaves for whoever looks at it later."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from laconic.data.federation import Federation

QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""Where distributions over clients are looked at."""
_CLIENTS, _COLUMNS = 200, 100  # rows and columns of the table at the most, however many clients and classes there are


def split_of(federation: Federation) -> dict[str, Any]:
    """The split of a federation's training examples, of bounded size.

    `examples`, `labels` and `largest_share` are quantiles over all clients: of their examples, of how many labels they
    have, and of the share of a client's commonest label. `table` holds counts by client (`table_clients`: all, or an
    even choice of them) and label, where each column is `labels_per_column` labels wide.

    >>> from laconic.data import digits
    >>> split = split_of(digits(clients=4))
    >>> split["clients"], split["classes"], len(split["table"]), sum(map(sum, split["table"])) == split["total"]
    (4, 10, 4, True)
    """
    sizes, clients, classes = federation.train_rows.sizes, federation.num_clients, federation.classes
    split: dict[str, Any] = {
        "clients": clients,
        "classes": classes,
        "total": int(sizes.sum()),
        "test": len(federation.common),
        "quantiles": list(QUANTILES),
        "examples": _quantiles(sizes),
    }
    if not classes:
        return split
    # Only the cells that are not empty: clients times classes may be far more than there are examples.
    owners, labels = federation.train_labels()
    cells, counts = np.unique(owners * classes + labels, return_counts=True)
    owner = cells // classes
    held = np.bincount(owners, minlength=clients)
    commonest = np.zeros(clients, dtype=np.int64)
    np.maximum.at(commonest, owner, counts)
    chosen = np.unique(np.linspace(0, clients - 1, min(clients, _CLIENTS)).round().astype(np.int64))
    width = -(-classes // _COLUMNS)
    table = np.zeros((len(chosen), -(-classes // width)), dtype=np.int64)
    row = np.searchsorted(chosen, owner)
    shown = chosen[np.minimum(row, len(chosen) - 1)] == owner
    np.add.at(table, (row[shown], cells[shown] % classes // width), counts[shown])
    return {
        **split,
        "labels": _quantiles(np.bincount(owner, minlength=clients)),
        "largest_share": _quantiles(commonest[held > 0] / held[held > 0]),
        "labels_per_column": width,
        "table_clients": chosen.tolist(),
        "table": table.tolist(),
    }


def _quantiles(values: NDArray[Any]) -> list[float]:
    return [round(float(value), 6) for value in np.quantile(values, QUANTILES)] if len(values) else []
