"""The pictures in docs: `python tests/console_pictures.py docs/images` draws the console of the test pipeline after a minute."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from console_pipeline import TOKEN, Running, until
from penstock.runtime.telemetry import history
from penstock.source import ConnectorMetrics

PICTURES = {
    "console": (1280, 4000, "light"),
    "console-dark": (1280, 1280, "dark"),
    "console-phone-dark": (390, 1700, "dark"),
}
"""Of each its width, its height at most, and its theme."""
PANELS = {"flow": "flow", "epochs": "epochs"}
"""Single panels, for the page of concepts."""
SLOT = {"slot_reserved": 1.0, "slot_held_bytes": 12e6, "slot_safe_bytes": 9e8}
SECS = float(os.environ.get("PICTURE_SECS", "60"))


def main(target: Path) -> None:
    os.environ["CONSOLE_TEST_TOKEN"] = TOKEN
    history.FINE_SECS = 1
    with tempfile.TemporaryDirectory() as home:
        running = Running(Path(home))
        running.telemetry.counters["source:database"] = lambda: ConnectorMetrics(custom=SLOT)
        end, number = time.monotonic() + SECS, 1000
        while time.monotonic() < end:
            number += 1
            running.database.put("public.orders", number, f"row {number}")
            time.sleep(0.2)
        running.telemetry.retry("sink:lake", "the store answered 503, slow down", 0.0)
        try:
            draw(running.url, target)
        finally:
            running.end()


def draw(url: str, target: Path) -> None:
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{flag}")
    page = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    try:
        for name, (width, most, theme) in PICTURES.items():
            sized(page, width, 900)
            page.get(url)
            page.execute_script("localStorage.theme = arguments[0]; sessionStorage.token = arguments[1]", theme, TOKEN)
            page.get("about:blank")
            page.get(url)
            until(lambda: page.execute_script("return document.querySelectorAll('#panel-letters details').length"))
            sized(page, width, min(most, page.execute_script("return document.documentElement.scrollHeight")))
            until(lambda width=width: page.execute_script("return innerWidth") == width)
            page.save_screenshot(str(target / f"{name}.png"))
            if theme == "light":
                for panel, called in PANELS.items():
                    page.find_element("id", f"panel-{panel}").screenshot(str(target / f"{called}.png"))
    finally:
        page.quit()


def sized(page: webdriver.Chrome, width: int, height: int) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
