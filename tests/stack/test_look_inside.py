"""The page's "Look inside" in a real browser over a real server: what it shows, by pointer and by keyboard, in both
themes and on a phone. With ``QUIRE_SCREENSHOTS`` set to a folder it leaves the pictures of the docs there."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import chromium, until, violations
from stack import Server

pytestmark = pytest.mark.slow
ActionChains = pytest.importorskip("selenium.webdriver.common.action_chains").ActionChains
Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys

QUICK = ("--shutdown-timeout=1",)
PREFIX = "Once upon a time there was a little girl who lived in a small house near the big forest. " * 6


def ask(url: str, prompt: str, stop: threading.Event) -> None:
    """One request after the other until ``stop``."""
    where = urllib.parse.urlsplit(url)
    body = json.dumps({"prompt": prompt, "max_tokens": 300, "ignore_eos": True, "model": "quire-demo"})
    while not stop.is_set():
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            connection.getresponse().read()


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """One with work: half of its requests begin alike, and some wait."""
    stop = threading.Event()
    ngram = '--speculative-config={"method": "ngram", "num_speculative_tokens": 3}'
    small = (
        "--block-size=8",
        "--max-model-len=512",
        "--num-gpu-blocks-override=220",
        "--max-num-seqs=8",
    )  # so that some are preempted
    with contextlib.closing(Server(*small, ngram, *QUICK)) as running:
        prompts = [PREFIX + f"Her name was {each}" if each % 2 else f"Day {each}: the dog" for each in range(12)]
        askers = [threading.Thread(target=ask, args=(running.url, prompt, stop)) for prompt in prompts]
        for asker in askers:
            asker.start()
        try:
            yield running
        finally:
            stop.set()
            running.process.terminate()
            for asker in askers:
                asker.join()


def shoot(driver: Any, name: str) -> None:
    if folder := os.environ.get("QUIRE_SCREENSHOTS"):
        driver.save_screenshot(str(Path(folder) / f"{name}.png"))


def opened(driver: Any, server: Any) -> None:
    driver.get(server.url + "/#inside")
    until(driver, "document.querySelector('.inside')?.dataset.state === 'live'")
    until(driver, "document.querySelectorAll('#in-rows ~ div tbody tr').length >= 4")
    until(driver, "Number(document.querySelector('.map .legend li:last-child b').textContent) > 0")  # shared blocks
    points = 8 if os.environ.get("QUIRE_SCREENSHOTS") else 2  # pictures have a line to show
    until(driver, f"document.querySelector('.spark .line').getAttribute('d')?.split('L').length > {points}")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_shows_the_server_at_work(server: Any, dark: bool) -> None:
    with chromium(1280, 1500, dark) as driver:
        opened(driver, server)
        text = driver.find_element("css selector", ".inside").text
        assert "Replica 0: 220 blocks of 8 tokens" in text and "ready" in text and "running" in text
        assert violations(driver) == []
        cells = driver.find_element("css selector", "canvas.cells")
        ActionChains(driver).move_to_element_with_offset(
            cells, 8 - cells.size["width"] // 2, 8 - cells.size["height"] // 2
        ).perform()
        assert driver.find_element("css selector", ".map .words").text.startswith("Block 0: ")
        driver.execute_script("arguments[0].focus()", cells)
        for _ in range(3):
            ActionChains(driver).send_keys(Keys.ARROW_RIGHT).perform()
        assert cells.get_attribute("aria-valuetext").startswith("Block 3: ")
        shoot(driver, "look-inside-dark" if dark else "look-inside")
        length = "document.querySelector('.spark .line').getAttribute('d').length"
        marked = "return [arguments[0].ariaValueText, document.querySelectorAll('tr.lit').length]"
        for _ in range(3):  # whoever holds it after another event of the feed
            until(driver, f"{length} !== {driver.execute_script('return ' + length)}")
            words, rows = driver.execute_script(marked, cells)
            assert rows == words.count(" (")
        stop = driver.find_element("css selector", "#in-steps ~ .bar button")
        stop.send_keys(Keys.ENTER)
        assert stop.get_attribute("aria-pressed") == "true"
        steps = driver.find_element("css selector", "canvas.steps")
        driver.execute_script("arguments[0].focus()", steps)
        ActionChains(driver).send_keys(Keys.ARROW_LEFT).perform()
        assert "step of replica 0" in (told := steps.get_attribute("aria-valuetext"))
        until(driver, f"{length} > {driver.execute_script('return ' + length)} + 8")  # the feed has gone on
        assert steps.get_attribute("aria-valuetext") == told  # it stands
        driver.find_element("css selector", "#in-steps ~ details summary").click()
        until(driver, "document.querySelectorAll('#in-steps ~ details tbody tr').length > 5")
        assert violations(driver) == []


def test_on_a_phone_nothing_is_wider_than_the_screen(server: Any) -> None:
    with chromium(390, 844) as driver:
        opened(driver, server)
        assert driver.execute_script("return document.documentElement.scrollWidth") <= 390
        assert driver.execute_script("const e = document.getElementById('inside-panel'); return e.scrollWidth") <= 390
        assert violations(driver) == []
        shoot(driver, "look-inside-phone")
        driver.execute_script(
            "document.getElementById('theme-button').click(); document.getElementById('theme-button').click()"
        )
        assert driver.execute_script("return document.documentElement.dataset.theme") == "dark"
        assert violations(driver) == []
        seen = set()
        for _ in range(24):  # all that can be done is reached by Tab
            ActionChains(driver).send_keys(Keys.TAB).perform()
            seen.add(driver.execute_script("const e = document.activeElement; return e.ariaLabel || e.textContent"))
        wanted = {
            "KV blocks of replica 0",
            "Stop",
            "Scroll through the steps",
            "Steps",
            "As a table",
            "Sequences that run",
        }
        assert wanted <= seen and any(each.startswith("Show the blocks of ") for each in seen)


SCROLLED = """
const bar = document.querySelector('#in-steps ~ .bar input'), found = [];
let loss = 0;
for (let at = Number(bar.max); at > 0; at -= 50) {
  bar.value = at;
  bar.dispatchEvent(new Event('input'));
  const rows = [...document.querySelectorAll('#in-steps ~ details tbody td:last-child')].map(each => each.innerText);
  found.push(...rows);
  if (rows.some(each => each.includes('was lost'))) loss = at;
}
bar.value = loss + 40;
bar.dispatchEvent(new Event('input'));
return found.join('; ')
"""
"""Scroll through all, and back to a loss; the words about what happened."""


def test_preemptions_drafts_and_a_loss_are_told(server: Any) -> None:
    """What seldom happens is found again when the timeline is stopped and scrolled, however fast the steps go by."""
    count = "document.querySelector('.tiles').innerText.match(/(\\S+) preemption/)[1]"
    with chromium(1280, 1300, True) as driver:
        opened(driver, server)
        before = driver.execute_script("return " + count)
        driver.find_element("css selector", "#in-steps ~ details summary").click()
        until(driver, f"{count} !== '{before}'")
        assert "; by position " in driver.find_element("css selector", ".tiles .tile:last-child small").text
        os.kill(int(driver.find_element("css selector", "#in-workers ~ div td:last-child").text), signal.SIGKILL)
        until(driver, "/was lost/.test(document.querySelector('#in-steps ~ details tbody').innerText)")
        until(driver, "Number(document.querySelector('.map .legend li:last-child b')?.textContent) > 0")
        assert violations(driver) == []
        found = driver.execute_script(SCROLLED)
        driver.find_element("css selector", "#in-steps ~ details summary").click()
        shoot(driver, "look-inside-loss")
        assert "replica 0 joined" in found and "preemption" in found and "computed again" in found
        assert "back in line" in found


def test_it_lets_go_of_the_feed_and_comes_back_when_it_was_lost() -> None:
    with contextlib.closing(Server(*QUICK)) as running, chromium() as driver:
        driver.get(running.url + "/#inside")
        until(driver, "document.querySelector('.inside')?.dataset.state === 'live'")
        port = urllib.parse.urlsplit(running.url).port
        running.process.terminate()
        running.process.wait()
        until(driver, "document.querySelector('.inside').dataset.state === 'lost'")
        with contextlib.closing(Server(f"--port={port}", *QUICK)):
            until(driver, "document.querySelector('.inside').dataset.state === 'live'")
            driver.execute_script("location.hash = 'chat'")
            until(driver, "!document.querySelector('.inside')")
