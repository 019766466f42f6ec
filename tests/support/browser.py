"""Debian's Chromium without a window, driven by selenium, and axe-core's rules of accessibility."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 20


@contextlib.contextmanager
def chromium(width: int = 1280, height: int = 1000, dark: bool = False) -> Iterator[Any]:
    """A browser of this size. Skips the test where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver")
    found = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if missing := [name for name, path in found.items() if path is None]:
        pytest.skip(f"needs a browser: {' and '.join(missing)} (apt install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = found["chromium"]
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    options.add_argument(f"--window-size={width},{height}")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(found["chromedriver"]))
    try:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield driver
    finally:
        driver.quit()


def violations(driver: Any) -> list[str]:
    """What axe-core finds wrong with the page as it is, one line each."""
    folder = Path(pytest.importorskip("axe_core_python").__file__).parent
    driver.execute_script(next(folder.rglob("axe.min.js")).read_text("utf-8"))
    found = driver.execute_async_script("axe.run().then(arguments[arguments.length - 1])")
    return [f"{each['id']}: {node['html'][:200]}" for each in found["violations"] for node in each["nodes"]]


def until(driver: Any, script: str) -> Any:
    """Wait until an expression of JavaScript is true, and return its value."""
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(driver, WAIT_S, 0.1).until(lambda each: each.execute_script(f"return {script}"))
