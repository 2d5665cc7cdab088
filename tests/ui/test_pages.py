"""The report and the live page in a real browser. `make ui-test`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests.report.conftest import make
from tests.ui.browser import browser, console_errors, open_page

from laconic.report import WatchServer, write_report

pytestmark = pytest.mark.ui
PLOTS = ("trade-off", "rounds", "traffic", "clients", "spread", "sparsity", "split")
HOSTILE = "<img src=x onerror=window.hacked=1>"


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    for name in ("fedavg", "eden", "fedsparse"):
        for seed in (0, 1):
            make(out, name, seed)
    make(out, "fedpm", 0, method={"name": "fedpm", "local_epochs": 1}).rename(out / HOSTILE)
    return out


@pytest.fixture(scope="session")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_report([runs], tmp_path_factory.mktemp("report") / "report.html").as_uri()


@pytest.fixture(scope="module")
def desk() -> Iterator[Any]:
    with browser(width=1280, height=900) as driver:
        yield driver


@pytest.fixture
def page(desk: Any, report: str) -> Iterator[Any]:
    open_page(desk, report)
    yield desk
    assert console_errors(desk) == []


def until(holds: Callable[[], Any], seconds: float = 30.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)
    return found


def js(driver: Any, text: str, *arguments: Any) -> Any:
    return driver.execute_script(text, *arguments)


def drawn_again(driver: Any, act: Callable[[], Any]) -> None:
    before = js(driver, "return document.documentElement.dataset.drawn")
    act()
    until(lambda: js(driver, "return document.documentElement.dataset.drawn") != before)


def all_of(driver: Any, selector: str) -> list[Any]:
    found: list[Any] = driver.find_elements("css selector", selector)
    return found


def click(driver: Any, selector: str) -> None:
    drawn_again(driver, lambda: js(driver, "arguments[0].click()", all_of(driver, selector)[0]))


def curves(driver: Any, plot: str) -> int:
    return len(all_of(driver, f"#{plot} .curve"))


# --- the report --------------------------------------------------------------------------------------------------


def test_everything_is_drawn(page: Any) -> None:
    for plot in PLOTS:
        box = js(page, "return document.querySelector(arguments[0]).getBoundingClientRect().toJSON()", f"#{plot} svg")
        assert box["width"] > 300, plot
        assert box["height"] > 100, plot
    assert curves(page, "trade-off") == curves(page, "rounds") == 4
    assert curves(page, "traffic") == curves(page, "clients") == 8  # up and down; the worst tenth and all
    assert len(all_of(page, "#trade-off .band")) == 3  # three methods have two seeds
    assert len(all_of(page, "#trade-off .front")) == 1
    assert len(all_of(page, "#trade-off .ring")) >= 1
    assert len(all_of(page, "#summary tbody tr")) == 4
    assert len(all_of(page, "#runs details")) == 7
    assert len(all_of(page, "#split .cell")) > 3
    assert page.title == js(page, "return document.getElementById('title').textContent") == "4 settings on digits"
    paths = js(page, "return [...document.querySelectorAll('svg path')].map((p) => p.getAttribute('d'))")
    assert all(path and "NaN" not in path and "Infinity" not in path for path in paths)


def test_it_asks_nobody_for_anything(page: Any) -> None:
    assert js(page, "return performance.getEntriesByType('resource').filter((e) => !e.name.startsWith('data:'))") == []


def test_names_are_text(page: Any) -> None:
    assert js(page, "return window.hacked") is None
    assert all_of(page, "img") == []
    assert HOSTILE in js(page, "return document.getElementById('runs').textContent")


def test_methods_are_shown_and_hidden(page: Any) -> None:
    assert len(all_of(page, "#legend .chip")) == 4
    click(page, "#legend .chip:nth-child(2)")
    assert curves(page, "trade-off") == curves(page, "rounds") == 3
    assert (curves(page, "traffic"), len(all_of(page, "#spread .series"))) == (6, 3)
    assert all_of(page, "#legend .chip")[1].get_attribute("aria-pressed") == "false"
    assert len(all_of(page, "#summary tr.off")) == 1
    click(page, "#legend .chip:nth-child(2)")
    assert curves(page, "trade-off") == 4
    chip = all_of(page, "#legend .chip")[0]
    drawn_again(page, lambda: js(page, "arguments[0].dispatchEvent(new MouseEvent('dblclick'))", chip))
    assert curves(page, "trade-off") == 1


def test_nothing_is_shown_and_nothing_breaks(page: Any) -> None:
    for i in range(4):
        click(page, f"#legend .chip:nth-child({i + 1})")
    assert curves(page, "trade-off") == curves(page, "traffic") == 0


def test_layers_are_shown_and_hidden(page: Any) -> None:
    (choice,) = all_of(page, "#sparsity select")
    js(page, "const s = arguments[0]; s.value = 'fedsparse'; s.dispatchEvent(new Event('change'))", choice)
    until(lambda: len(all_of(page, "#sparsity .layers .chip")) == 3)  # two layers, and all
    before = curves(page, "sparsity")
    click(page, "#sparsity .layers .chip")
    assert curves(page, "sparsity") == before - 1


def test_figures_and_ways_are_chosen(page: Any) -> None:
    before = all_of(page, "#trade-off .curve")[0].get_attribute("d")
    click(page, "#trade-off [data-value=up]")
    up = all_of(page, "#trade-off .curve")[0].get_attribute("d")
    assert up != before
    click(page, "#trade-off [data-value=local_accuracy_worst_decile]")
    assert all_of(page, "#trade-off .curve")[0].get_attribute("d") != up
    click(page, "#trade-off [data-value=global_loss]")
    assert "server’s loss" in js(page, "return document.querySelector('#rounds svg').getAttribute('aria-label')")


def moved(driver: Any, selector: str, x: float, y: float, kind: str = "pointermove", **more: Any) -> None:
    js(
        driver,
        "const e = document.querySelector(arguments[0]), b = e.getBoundingClientRect();"
        "e.dispatchEvent(new PointerEvent(arguments[3], {clientX: b.left + arguments[1] * b.width,"
        " clientY: b.top + arguments[2] * b.height, bubbles: true, ...arguments[4]}))",
        *(selector, x, y, kind, {"pointerType": "mouse", **more}),
    )


@pytest.mark.parametrize(
    ("plot", "words"),
    [
        *(("trade-off", ("round", "bytes both ways", "%")), ("rounds", ("round", "fedsparse"))),
        *(("traffic", ("fedavg up", "fedavg down", "B")), ("clients", ("all clients", "%"))),
        *(("spread", ("worst tenth", "median")), ("sparsity", ("round", "%")), ("split", ("client", "label"))),
    ],
)
def test_hovering_says_what_is_there(page: Any, plot: str, words: tuple[str, ...]) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    svg = all_of(page, f"#{plot} svg")[0]
    js(page, "arguments[0].scrollIntoView({block: 'center'})", svg)
    ActionChains(page).move_to_element(svg).perform()
    (tip,) = until(lambda: all_of(page, f"#{plot} .tip:not([hidden])"))
    text = js(page, "return arguments[0].textContent", tip)
    assert all(word in text for word in words), text
    inside = "const t = arguments[0].getBoundingClientRect(); return t.left >= 0 && t.right <= innerWidth"
    assert js(page, inside, tip)
    moved(page, f"#{plot} svg", 0.5, 0.5, "pointerleave")
    assert all_of(page, f"#{plot} .tip:not([hidden])") == []


def test_looking_closer_and_back(page: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    svg = all_of(page, "#trade-off svg")[0]
    before = js(page, "return document.querySelector('#trade-off svg').textContent")
    chain = ActionChains(page).move_to_element_with_offset(svg, 100, -80).click_and_hold()
    drawn_again(page, lambda: chain.move_by_offset(60, 40).move_by_offset(200, 100).release().perform())
    assert js(page, "return document.querySelector('#trade-off svg').textContent") != before
    click(page, "#trade-off .reset")
    assert js(page, "return document.querySelector('#trade-off svg').textContent") == before


def test_how_to_repeat_it(page: Any) -> None:
    js(page, "document.querySelector('#runs summary').click()")
    text = js(page, "return document.querySelector('#runs details[open]').textContent")
    assert "laconic run " in text
    assert "--out repeated" in text
    assert "state hash" in text
    assert "torch " in text


def background(driver: Any) -> str:
    found: str = js(driver, "return getComputedStyle(document.body).backgroundColor")
    return found


def test_dark_and_light(page: Any, report: str) -> None:
    light = background(page)
    js(page, "document.getElementById('theme').click()")
    dark = background(page)
    assert light != dark
    open_page(page, report)
    assert background(page) == dark, "it is remembered"
    js(page, "document.getElementById('theme').click(); localStorage.clear()")
    assert background(page) == light
    with browser(width=1280, height=900, dark=True) as other:
        open_page(other, report)
        assert background(other) == dark, "it is what the reader's system likes"
        assert console_errors(other) == []


@pytest.mark.parametrize("width", [320, 390, 768])
def test_on_a_phone_nothing_is_wider_than_the_screen(report: str, width: int) -> None:
    with browser(width=width, height=800) as phone:
        open_page(phone, report)
        js(phone, "document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        assert js(phone, "return innerWidth") == width
        assert js(phone, "return document.documentElement.scrollWidth") <= width
        wide = (
            "return [...document.querySelectorAll('.card, svg, header, footer')].filter((e) => "
            "e.getBoundingClientRect().right > innerWidth + 0.5).map((e) => e.id || e.tagName)"
        )
        assert js(phone, wide) == []
        assert console_errors(phone) == []


def test_one_run_alone(desk: Any, runs: Path, tmp_path: Path) -> None:
    open_page(desk, write_report([runs / "fedavg-0"], tmp_path / "one.html").as_uri())
    assert curves(desk, "trade-off") == 1
    assert all_of(desk, "#legend .chip") == []
    assert not js(desk, "return document.getElementById('settings').checkVisibility()")
    assert console_errors(desk) == []


# --- live --------------------------------------------------------------------------------------------------------


def test_a_run_is_watched_while_it_is_going(desk: Any, runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "live"
    folder.mkdir()
    shutil.copytree(runs / "eden-0", folder / "old")
    (folder / "old" / "summary.json").unlink()
    code = (
        "import sys; from pathlib import Path; from tests.report.conftest import make;"
        "make(Path(sys.argv[1]), 'fedavg', 0, rounds=100000)"
    )
    with WatchServer(folder, port=0) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        process = None
        try:
            open_page(desk, server.url)
            until(lambda: states(desk) == {"old": "interrupted"})
            process = subprocess.Popen([sys.executable, "-c", code, str(folder)])
            until(lambda: states(desk) == {"old": "interrupted", "fedavg-0": "running"}, seconds=120)
            until(lambda: curves(desk, "trade-off") == 2, seconds=60)
            before = drawn(desk, "rounds")
            until(lambda: drawn(desk, "rounds") != before, seconds=60)
            js(desk, "document.querySelector('#legend .chip').click()")
            until(lambda: curves(desk, "trade-off") == 1)
            process.kill()
            process.wait()
            until(lambda: states(desk)["fedavg-0"] == "interrupted")
            assert curves(desk, "trade-off") == 1, "what its reader chose stays chosen"
            assert "nothing is running" in js(desk, "return document.getElementById('live').textContent")
            assert console_errors(desk) == []
        finally:
            if process is not None:
                process.kill()
            desk.get("about:blank")
            server.shutdown()
            thread.join()


def drawn(driver: Any, plot: str) -> str:
    """What a plot shows: it changes with every record that comes in."""
    found: str = js(driver, f"return document.querySelector('#{plot} svg').outerHTML")
    return found


def states(driver: Any) -> dict[str, str]:
    found: dict[str, str] = js(
        driver,
        "return Object.fromEntries([...document.querySelectorAll('#runs details')].map((d) =>"
        " [d.dataset.run, d.querySelector('.state').textContent]))",
    )
    return found
