"""Run a recipe and leave its result: `result.json`, `table.md` and, where matplotlib is installed, `figure.svg`."""

from __future__ import annotations

import io
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from laconic.cluster import Cluster
from laconic.core import ConfigError, RunError
from laconic.engine import versions
from laconic.engine.files import cannot_write, write_atomically
from laconic.engine.simulate import one_thread
from laconic.reproduce.catalogue import recipes
from laconic.reproduce.recipe import Draw, Job, Recipe, Row, find
from laconic.reproduce.runs import runs_table
from laconic.reproduce.training import Training

RESULT, TABLE, FIGURE = "result.json", "table.md", "figure.svg"

NO_FIGURE = 'left out: drawing needs matplotlib; run: pip install "laconic[report]"'


@dataclass(frozen=True)
class Result:
    """A result and where it lies."""

    recipe: Recipe
    rows: tuple[Row, ...]
    record: Mapping[str, Any]
    folder: Path


def reproduce(
    name: str,
    *,
    out: Path | str = "results",
    scale: float | None = None,
    seed: int = 0,
    adopt: Iterable[Path | str] = (),
    train: bool = True,
    cluster: Cluster | None = None,
) -> Result:
    """Run the recipe of that name and write its files into `out/name`.

    `result.json` is written last: where it stands, the other files belong to it. Runs of the very same configuration
    that stand in `out` or in the folders `adopt` are taken up instead of being made again; without `train`, the result
    is of these alone. With a `cluster`, a recipe that trains spreads its runs over it (`out` is then a folder that all
    machines share).

    >>> import tempfile
    >>> result = reproduce("fedpm-privacy", out=tempfile.mkdtemp(), scale=0.01)
    >>> result.rows[0].label, result.rows[0].within
    ('cap on ε: 5·r_5(0.2) + ln(1e4)/4', True)
    """
    recipe = find(recipes, name)
    scale = recipe.scale if scale is None else scale
    if not 0 < scale <= 1:
        raise ConfigError(f"reproduce: scale must be in (0, 1], got {scale}; 1 is the paper's own scale.")
    if seed < 0:
        raise ConfigError(f"reproduce: seed must be ≥ 0, got {seed}.")
    if cluster is not None and not isinstance(recipe.run, Training):
        raise ConfigError(f"reproduce: {name} has no runs that a cluster could take; leave --engine ray out.")
    folder = Path(out) / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from None
    start, busy = time.perf_counter(), _processor_seconds()
    with _no_empty_folder(folder), one_thread():  # sums in one order, whatever the machine
        job = Job(seed, scale, folder, adopt=tuple(map(Path, adopt)), train=train, cluster=cluster)
        outcome = recipe.run(job)
    seconds, busy = time.perf_counter() - start, _processor_seconds() - busy
    picture = None if outcome.draw is None else _svg(outcome.draw)
    figure = "none" if outcome.draw is None else FIGURE if picture is not None else NO_FIGURE
    record = {
        "name": name,
        "reproduces": recipe.reproduces,
        "command": f"laconic reproduce {name} --scale {scale:g} --seed {seed}" + ("" if train else " --no-train"),
        "seed": seed,
        "scale": scale,
        "seconds": round(seconds, 3),
        "processor_seconds": round(busy, 3),
        **({} if outcome.seconds is None else {"training_seconds": round(outcome.seconds, 3)}),
        "versions": versions(),
        "settings": dict(recipe.settings),
        "paper": dict(recipe.paper),
        "rows": [{**asdict(row), "within": row.within} for row in outcome.rows],
        "figure": figure,
        "data": dict(outcome.data),
    }
    result = Result(recipe, outcome.rows, record, folder)
    _write(result, picture)
    return result


@contextmanager
def _no_empty_folder(folder: Path) -> Iterator[None]:
    """A recipe that fails before it has anything to keep leaves nothing behind."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            folder.rmdir()
        raise


def _processor_seconds() -> float:
    """Of this process and of its children that have ended: what a busy machine does not change."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _write(result: Result, picture: bytes | None) -> None:
    # Encoded before anything is touched: a recipe whose data are no JSON must not cost the result that was there.
    try:
        text = json.dumps(result.record, indent=1, allow_nan=False, ensure_ascii=False)
    except ValueError as error:
        raise RunError(
            f"reproduce {result.recipe.name}: a figure is not finite ({error}); try another scale."
        ) from None
    for old in (RESULT, FIGURE):  # a figure of another run must not stand beside this one's table
        try:
            (result.folder / old).unlink(missing_ok=True)
        except OSError as error:
            raise cannot_write(result.folder / old, error) from None
    if picture is not None:
        write_atomically(result.folder / FIGURE, picture)
    write_atomically(result.folder / TABLE, markdown(result).encode())
    write_atomically(result.folder / RESULT, f"{text}\n".encode())


def markdown(result: Result) -> str:
    """The table, with what made it."""
    record = result.record
    made = ", ".join(f"{name} {number}" for name, number in record["versions"].items() if name != "platform")
    took = f"{record['seconds']:.1f} s ({record['processor_seconds']:.1f} s of processor)"
    if "training_seconds" in record:
        took = f"its runs took {duration(record['training_seconds'])} in all"
    lines = [
        f"# {record['name']}: {record['reproduces']}",
        "",
        f"`{record['command']}`, {took}, {made}, {record['versions']['platform']}.",
        "",
        *table(result.rows),
    ]
    if "runs" in record["data"]:
        lines += ["", *runs_table(record["data"]["runs"])]
        if absent := record["data"]["missing"]:
            lines += ["", f"Not run: {'; '.join(absent)}."]
        lines += ["", "*accuracy*: mean of the last ten evaluations; *both ways*: share of the first row's bytes."]
    if record["figure"] == FIGURE:
        lines += ["", f"![{record['reproduces']}]({FIGURE})"]
    elif record["figure"] != "none":
        lines += ["", f"Figure {record['figure']}."]
    return "\n".join(lines) + "\n"


def table(rows: Iterable[Row]) -> list[str]:
    """Rows as the lines of a Markdown table."""
    lines = ["| | ours | paper | expected | tolerance | within | |", "|---|---:|---:|---:|---:|---|---|"]
    return lines + ["| " + " | ".join(cells(row)).replace("\n", " ") + " |" for row in rows]


def cells(row: Row) -> tuple[str, ...]:
    """A row as text; what is not known is a dash."""
    within = {True: "yes", False: "**no**", None: "–"}[row.within]
    numbers = (_number(value) for value in (row.ours, row.paper, row.expected, row.tolerance))
    return (row.label, *numbers, within, row.note)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.5g}"


class Found(NamedTuple):
    """A result that was written earlier: how many rows were compared, how many were within, and how it was made."""

    compared: int
    within: int
    scale: float
    seconds: float


def found(out: Path | str, name: str) -> Found | None:
    """The result that stands in `out/name`, if there is one that can be read."""
    try:
        record = json.loads((Path(out) / name / RESULT).read_text(encoding="utf-8"))
        compared = [row["within"] for row in record["rows"] if row["within"] is not None]
        seconds = float(record.get("training_seconds", record["seconds"]))
        return Found(len(compared), sum(compared), float(record["scale"]), seconds)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _svg(draw: Draw) -> bytes | None:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return None
    buffer = io.BytesIO()
    # Names of clip paths and the date would make every file differ.
    with matplotlib.rc_context({"svg.hashsalt": "laconic", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(layout="constrained")
        draw(figure)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def duration(seconds: float) -> str:
    """About how long.

    >>> duration(8), duration(200), duration(10_000)
    ('8 s', '3 min', '2.8 h')
    """
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
