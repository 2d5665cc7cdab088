"""Comparisons: several methods, several seeds, equal conditions, one table."""

from laconic.comparison.compare import Conditions, compare, compare_tables
from laconic.comparison.entries import read_entries
from laconic.comparison.result import Comparison, Outcome
from laconic.comparison.table import Row, Target, cells, terminal
from laconic.comparison.trials import Manner, Trial, run_trials

__all__ = [
    "Comparison",
    "Conditions",
    "Manner",
    "Outcome",
    "Row",
    "Target",
    "Trial",
    "cells",
    "compare",
    "compare_tables",
    "read_entries",
    "run_trials",
    "terminal",
]
