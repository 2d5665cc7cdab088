"""A real browser for the pages: Debian's Chromium, driven through its own driver; nothing is fetched from anywhere."""

from __future__ import annotations

import base64
import importlib.util
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def missing() -> str:
    """What of the browser is not installed, as one sentence; empty where all is."""
    found = {"chromium": _chromium(), "chromium-driver": shutil.which("chromedriver")}
    lacking = [name for name, path in found.items() if path is None]
    if lacking:
        return f"no {' and no '.join(lacking)} here: apt-get install {' '.join(lacking)}."
    return (
        "" if importlib.util.find_spec("selenium") else "no selenium here: pip install -c constraints.txt -e '.[ui]'."
    )


def _chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("google-chrome")


@contextmanager
def browser(*, width: int, height: int, dark: bool = False) -> Iterator[Any]:
    """A window of this size, without a screen; it asks no server of its maker's for anything."""
    if said := missing():
        raise RuntimeError(said)
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(prefix="laconic-ui-") as profile:
        options = Options()
        options.binary_location = _chromium() or ""
        for switch in (
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--proxy-server=127.0.0.1:9", "--proxy-bypass-list=127.0.0.1", f"--user-data-dir={profile}"),
        ):
            options.add_argument(switch)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
            )
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            yield driver
        finally:
            driver.quit()


def open_page(driver: Any, url: str) -> float:
    """Open one of our pages and wait until it has drawn everything; gives the seconds that it took."""
    began = time.perf_counter()
    driver.get(url)
    while not driver.execute_script("return document.documentElement.dataset.drawn"):
        if time.perf_counter() - began > 60:
            raise TimeoutError(f"{url} was not drawn within a minute")
        time.sleep(0.005)
    return time.perf_counter() - began


def picture(driver: Any, *, top: str = "body", bottom: str = "body") -> bytes:
    """A PNG of the page, as wide as the window, from the top of one element to the bottom of another."""
    first, last = driver.execute_script(
        "return [...arguments].map((s) => document.querySelector(s).getBoundingClientRect())"
        ".map((box) => [box.top + scrollY, box.bottom + scrollY, innerWidth])",
        *(top, bottom),
    )
    margin = 0 if top == "body" else 12
    clip = {"x": 0, "y": first[0] - margin, "width": first[2], "height": last[1] - first[0] + 2 * margin, "scale": 1}
    taken = driver.execute_cdp_cmd(
        "Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": clip}
    )
    return base64.b64decode(taken["data"])


def console_errors(driver: Any) -> list[str]:
    """What the page complained about since it was last asked."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


if __name__ == "__main__":
    sys.exit(missing() or None)
