"""Codecs: what turns a message into bytes. `parse` reads them from text, the catalogue makes them in Python.

>>> import torch
>>> from laconic.core import Key, Shared, spec_of
>>> tree = {"weight": torch.randn(100, 100), "bias": torch.randn(100)}
>>> shared = Shared(Key.from_seed(0))                          # what both ends know; a new key for every message
>>> codec = ef(topk(0.01) | eden(4))                           # or parse("ef(topk:fraction=0.01 | eden:bits=4)")
>>> state = codec.init_state(spec_of(tree))                    # what the sender remembers: here, a residual
>>> blob, state = codec.encode(tree, shared, state)
>>> decoded = codec.decode(blob, spec_of(tree), shared)        # the receiver knows names, shapes and types beforehand
>>> len(blob) < 250, torch.allclose(decoded["bias"] + state["bias"], tree["bias"])
(True, True)
"""

from laconic.codecs.catalogue import (
    bfloat16,
    codecs,
    drive,
    drive_mse,
    eden,
    float16,
    float32,
    int8,
    lean,
    lowrank,
    mask,
    mrc,
    qsgd,
    randk,
    signsgd,
    signsgd_mv,
    terngrad,
    threshold,
    topk,
)
from laconic.codecs.check import check_codec
from laconic.codecs.compose import Coder, Pipeline, Read, Shaped, Stage, Write
from laconic.codecs.contexts import Layout, layout_of, read_levels, write_levels
from laconic.codecs.dense import Floats
from laconic.codecs.entropy import Entropy, read_indices, read_symbols, write_indices, write_symbols
from laconic.codecs.factorize import LowRank
from laconic.codecs.feedback import ErrorFeedback, ef, with_memory
from laconic.codecs.lean import Lean
from laconic.codecs.masks import BitCoder, Coded, Plain
from laconic.codecs.measure import Measurement, measure
from laconic.codecs.quantize import Levels, LloydMax, Sign
from laconic.codecs.rotate import Rotate
from laconic.codecs.route import ByLeaf, by_leaf
from laconic.codecs.sparsify import RandomK, Threshold, TopK
from laconic.codecs.stream import Sink, Source
from laconic.codecs.text import parse
from laconic.codecs.wire import BROADCAST, HEADER_BYTES, CodecId, Direction, Header, seal, unseal

__all__ = [
    # the catalogue
    "bfloat16",
    "by_leaf",
    "codecs",
    "drive",
    "drive_mse",
    "ef",
    "eden",
    "float16",
    "float32",
    "int8",
    "lean",
    "lowrank",
    "mask",
    "mrc",
    "parse",
    "qsgd",
    "randk",
    "signsgd",
    "signsgd_mv",
    "terngrad",
    "threshold",
    "topk",
    # what codecs are made of
    "BitCoder",
    "ByLeaf",
    "Coded",
    "Coder",
    "Entropy",
    "ErrorFeedback",
    "Floats",
    "Layout",
    "Lean",
    "Levels",
    "LloydMax",
    "LowRank",
    "Pipeline",
    "Plain",
    "RandomK",
    "Read",
    "Rotate",
    "Shaped",
    "Sign",
    "Sink",
    "Source",
    "Stage",
    "Threshold",
    "TopK",
    "Write",
    "layout_of",
    "read_indices",
    "read_levels",
    "read_symbols",
    "with_memory",
    "write_indices",
    "write_levels",
    "write_symbols",
    # the frame
    "BROADCAST",
    "CodecId",
    "Direction",
    "HEADER_BYTES",
    "Header",
    "seal",
    "unseal",
    # examining them
    "Measurement",
    "check_codec",
    "measure",
]
