"""Speed and rate of every codec on one thread, against the bars: `python benchmarks/codecs.py [values]`.

Codecs take turns, so that a busy moment of the machine hits all of them; medians of the repetitions are shown.
"""

from __future__ import annotations

import statistics
import sys

import torch

from laconic.codecs import measure, parse
from laconic.codecs.measure import SHOWN
from laconic.core import Key

REPETITIONS = 7
SIZE = 2_262_602  # Conv-6
ONE_BIT, ROTATED, CODED = 100e6, 30e6, 10e6
BARS = {
    "signsgd": ONE_BIT,
    "signsgd_mv": ONE_BIT,
    "drive": ROTATED,
    "drive_mse": ROTATED,
    "eden:bits=0.5": ROTATED,
    "eden:bits=1": ROTATED,
    "eden:bits=2": CODED,
    "eden:bits=3": CODED,
    "eden:bits=4": CODED,
    "terngrad": CODED,
    "qsgd:levels=16": CODED,
    "qsgd:levels=512": CODED,
    "int8": CODED,
}


def main() -> None:
    torch.set_num_threads(1)
    size = int(float(sys.argv[1])) if len(sys.argv) > 1 else SIZE
    vector = torch.randn(size, generator=torch.Generator().manual_seed(0))
    codecs = [parse(text) for text in SHOWN]
    rows = [[measure(codec, vector, Key.from_seed(turn), repeats=1) for codec in codecs] for turn in range(REPETITIONS)]
    print(f"{size} Gaussian values, one thread, medians of {REPETITIONS}; speeds in million values a second")
    print(f"{'codec':34s} {'bits':>8s} {'entropy':>8s} {'nmse':>10s} {'encode':>8s} {'decode':>8s}   bar")
    failed = False
    for column in zip(*rows, strict=True):
        row = column[-1]
        encode = statistics.median(turn.encode_values_per_second for turn in column)
        decode = statistics.median(turn.decode_values_per_second for turn in column)
        bar = BARS.get(row.codec, 0.0)
        fast = min(encode, decode) >= bar
        entropy = row.entropy_bits or 0.0
        short = row.bits_per_value <= 1.005 * entropy + 8 * 64 / size or "|" in row.codec
        failed |= not (fast and short)
        verdict = f"{'PASS' if fast else 'FAIL'} ≥ {bar / 1e6:.0f}" if bar else ""
        print(
            f"{row.codec:34s} {row.bits_per_value:8.4f} {entropy:8.4f} {row.nmse:10.5f} "
            f"{encode / 1e6:8.1f} {decode / 1e6:8.1f}   {verdict}{'' if short else ' FAIL rate'}"
        )
    sys.exit(failed)


if __name__ == "__main__":
    main()
