"""Examples in docstrings, as code: a doctest up to the next empty line becomes a block of its own."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Fences around doctests."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Every docstring that is read passes here."""
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
