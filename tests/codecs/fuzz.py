"""Attack decoders with altered payloads: `python -m tests.codecs.fuzz [mutants [codec …]]`, a million by default.

Each codec runs in a process of its own under a limit of memory, so that a payload that makes its decoder allocate on
the payload's word ends as a failure, not as a slow machine. `make test` runs 10⁴ mutants in `test_laws.py`.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from laconic.codecs import parse
from laconic.codecs.check import FuzzReport, fuzz

VALUES = 300
CODECS = tuple(json.loads((Path(__file__).parents[1] / "golden" / "codecs.json").read_text()))


def _attack(text: str, mutants: int) -> FuzzReport:
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    tree = {"w": torch.randn(12, VALUES // 12, generator=random) ** 3, "mask": torch.rand(11, generator=random) < 0.5}
    fuzz(parse(text), tree, mutants=1000)  # what libraries allocate once is not the payload's doing
    limit = _address_space() + 2 * 4 * VALUES + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return fuzz(parse(text), tree, mutants=mutants, seed=1)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main() -> None:
    mutants = int(float(sys.argv[1])) if len(sys.argv) > 1 else 1_000_000
    chosen = tuple(sys.argv[2:]) or CODECS
    failed = False
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        began = time.perf_counter()
        for text, attack in [(text, pool.submit(_attack, text, mutants)) for text in chosen]:
            try:
                report = attack.result()
                slow = report.slowest_seconds > 5
                verdict = "TOO SLOW" if slow else "ok"
                failed |= slow
                numbers = f"{report.refused} refused, {report.decoded} decoded, slowest {report.slowest_seconds:.4f} s"
            except (AssertionError, MemoryError) as error:
                failed, verdict, numbers = True, "FAILED", str(error)[:500]
            print(f"{text:40s} {verdict:8s} {numbers}", flush=True)
        print(f"{mutants} mutants for each of {len(chosen)} codecs in {time.perf_counter() - began:.0f} s")
    sys.exit(failed)


if __name__ == "__main__":
    main()
