"""Named recipes that repeat the papers' tables and figures: `laconic reproduce NAME`."""

from laconic.reproduce.catalogue import recipes
from laconic.reproduce.recipe import Job, Outcome, Recipe, Row, find
from laconic.reproduce.runner import Found, Result, cells, duration, found, markdown, reproduce, table
from laconic.reproduce.runs import runs_table
from laconic.reproduce.training import Arm, Figure, Training, training_recipe

__all__ = [
    "Arm",
    "Figure",
    "Found",
    "Job",
    "Outcome",
    "Recipe",
    "Result",
    "Row",
    "Training",
    "cells",
    "duration",
    "find",
    "found",
    "markdown",
    "recipes",
    "reproduce",
    "runs_table",
    "table",
    "training_recipe",
]
