"""The report of a comparison: how large its file is and how long a browser takes to draw it.

Six methods train on the embedded digits for 1,000 rounds, evaluated after each; all records are of real runs, which
are kept in `--out` and not made again. Needs Chromium and its driver, as `make ui-test` does.
`python -m benchmarks.report`; docs/images show `--rounds 80 --cohort 6 --eval-every 4 --seeds 3 --images docs/images`.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from tests.ui.browser import browser, console_errors, open_page, picture

from benchmarks.rounds import Bar
from laconic.config import experiment_from
from laconic.report import write_report

SOLVER = {"local_epochs": 1, "batch_size": 10, "lr": 0.1}
ADAM = {"optimizer": "adam", "lr": 0.1, "local_epochs": 2, "batch_size": 10}
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "fedavg": {"method": {"name": "fedavg", **SOLVER}},
    "fedavg-eden": {"method": {"name": "fedavg", **SOLVER}, "link": {"up": "eden:bits=1", "down": "eden:bits=4"}},
    "fedsparse": {"method": {"name": "fedsparse", **SOLVER}},
    "fedpm": {"method": {"name": "fedpm", "scale": "kaiming", **ADAM}},
    "vardrop": {
        "method": {
            **{"name": "vardrop", "share_alpha": True, "first_log_sigma2": -8.0, "sigma_lr": 3.0},
            **{"kl_scale": 0.03, "kl_size": "local"},
            **{"optimizer": "adam", "lr": 5e-3, "local_steps": 8, "batch_size": 10},
        }
    },
    "lg_fedavg": {"method": {"name": "lg_fedavg", "global_layers": 1, "fedavg_rounds": 20, **SOLVER}},
}


def table(name: str, seed: int, *, rounds: int, cohort: int, eval_every: int) -> dict[str, dict[str, Any]]:
    """A run as sections of a configuration."""
    run = {"name": f"{name}-{seed}", "seed": seed, "rounds": rounds, "cohort": cohort, "eval_every": eval_every}
    return {
        "run": {**run, "workers": 0, "checkpoint_every": 250},
        "data": {"source": "digits", "clients": 30, "partition": {"kind": "dirichlet", "alpha": 0.5}},
        "model": {"name": "mlp", "hidden": [48]},
        "link": {},
        "newcomer": {},
        **RUNS[name],
    }


def make(task: tuple[str, int], *, out: Path, **size: int) -> Path:
    """Make a run, unless it stands there already."""
    experiment = experiment_from(table(*task, **size))
    folder = out / experiment.name
    if not (folder / "summary.json").exists():
        experiment.run(out=out, resume=True)
    return folder


def seconds_to_open(path: Path, *, repetitions: int) -> list[tuple[float, float]]:
    """From asking for the page until it has drawn everything, in a browser that is running already; and the processor
    time of the page's own thread in it, which other programs on the machine change little."""
    took = []
    with browser(width=1280, height=900) as driver:
        driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        for _ in range(repetitions):
            driver.get("about:blank")
            seconds = open_page(driver, path.resolve().as_uri())
            counted = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
            took.append((seconds, next(each["value"] for each in counted if each["name"] == "TaskDuration")))
        if said := console_errors(driver):
            raise AssertionError(said)
    return took


def take_pictures(path: Path, folder: Path) -> None:
    """The pictures of docs/images."""
    for name, width, dark, top, bottom in (
        ("report-light", 1240, False, "body", "#summary"),
        ("report-dark", 1240, True, "#rounds", "#split"),
        ("report-phone", 390, False, "body", "#rounds"),
    ):
        with browser(width=width, height=900, dark=dark) as driver:
            open_page(driver, path.resolve().as_uri())
            image = Image.open(io.BytesIO(picture(driver, top=top, bottom=bottom))).convert("RGB")
        # Few bytes without a visible loss: colours chosen to cover all that occur, then moved to where they are needed.
        few = image.quantize(256, method=Image.Quantize.MAXCOVERAGE, kmeans=4, dither=Image.Dither.NONE)
        few.save(folder / f"{name}.png", optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--cohort", type=int, default=2)
    parser.add_argument("--eval-every", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--images", type=Path, help="a folder for pictures of the report")
    parser.add_argument("--out", type=Path, help="where runs are kept (a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = arguments.out or Path(temporary)
        tasks = [(name, seed) for name in RUNS for seed in range(arguments.seeds)]
        began = time.perf_counter()
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            size = {"rounds": arguments.rounds, "cohort": arguments.cohort, "eval_every": arguments.eval_every}
            work = partial(make, out=out, **size)
            runs = []
            for folder in pool.map(work, tasks):
                print(f"{folder.name}: {arguments.rounds} rounds ({time.perf_counter() - began:.0f} s)", flush=True)
                runs.append(folder)
        began = time.perf_counter()
        path = write_report(runs, out / "report.html")
        print(f"{path} written in {time.perf_counter() - began:.2f} s")
        if arguments.images is not None:
            take_pictures(path, arguments.images)
        took = seconds_to_open(path, repetitions=arguments.repetitions)
        said = ", ".join(f"{seconds:.2f}" for seconds, _ in took)
        own = statistics.median(own for _, own in took)
        what = f"{len(runs)} runs of {arguments.rounds} rounds"
        bars = [
            Bar(f"size of the report of {what}, MB", path.stat().st_size / 1e6, 8.0),
            Bar(
                "seconds to open it in Chromium (median)",
                statistics.median(s for s, _ in took),
                3.0,
                f"({said}; {own:.2f} of processor time)",
            ),
        ]
    for bar in bars:
        print(bar.line())
    return 0 if all(bar.met for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
