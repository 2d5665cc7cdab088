"""Named recipes that repeat the papers' tables and figures: `laconic reproduce NAME`."""

from laconic.reproduce.catalogue import recipes
from laconic.reproduce.recipe import Job, Outcome, Recipe, Row, find
from laconic.reproduce.runner import Found, Result, cells, duration, found, markdown, reproduce, table

__all__ = [
    "Found",
    "Job",
    "Outcome",
    "Recipe",
    "Result",
    "Row",
    "cells",
    "duration",
    "find",
    "found",
    "markdown",
    "recipes",
    "reproduce",
    "table",
]
