"""Fill the tables of pages from the results of recipes: python results/tables.py [--check]

A place for the runs of a recipe is `<!-- runs: NAME -->` … `<!-- end -->` in results/README.md or docs/choosing.md. What
stands between is made from results/NAME/result.json; where there is none, it says how to make it.
"""

import json
import re
import sys
from pathlib import Path

from laconic.reproduce import duration, recipes, runs_table

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "results" / "README.md", ROOT / "docs" / "choosing.md")
PLACE = re.compile(r"(<!-- runs: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """A page with its tables made anew."""
    return PLACE.sub(lambda place: place[1] + "\n".join(lines(place[2])) + "\n" + place[3], text)


def lines(name: str) -> list[str]:
    """What a page says of a recipe."""
    recipe, path = recipes[name], ROOT / "results" / name / "result.json"
    if not path.is_file():
        about = f"about {duration(recipe.seconds)} at scale {recipe.scale:g}"
        return [f"*Not run yet: `laconic reproduce {name}`, {about}.*"]
    record = json.loads(path.read_text(encoding="utf-8"))
    return [*runs_table(record["data"]["runs"]), "", f"`{record['command']}`"]


if __name__ == "__main__":
    stale = [page for page in PAGES if filled(page.read_text(encoding="utf-8")) != page.read_text(encoding="utf-8")]
    for page in stale:
        if "--check" in sys.argv:
            sys.exit(f"{page.relative_to(ROOT)} is older than the results: run python results/tables.py")
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
