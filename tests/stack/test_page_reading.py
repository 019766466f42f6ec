"""The page's chat where it is read: Markdown as models write it, a phone, a second chat while one is being answered."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from browser import chromium, until, violations
from stack import Server

Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with contextlib.closing(Server("--shutdown-timeout=1")) as running:
        yield running


def opened(driver: Any, server: Server, *chats: dict[str, Any]) -> None:
    """The page, with these conversations kept in the browser, the last of them open."""
    driver.get(server.url + "/page/icon.svg")
    for number, chat in enumerate(chats):
        text = json.dumps({"id": str(number), "updated": number, "settings": {}, **chat})
        driver.execute_script("localStorage.setItem('quire.chat.' + arguments[0], arguments[1])", str(number), text)
    driver.get(server.url + "/")
    until(driver, "document.querySelector('#chat-model option')")


def answered(title: str, content: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": content}]
    return {"title": title, "messages": messages}


CODE = "import os\n\ndef f():\n    - 1\n    return os"
"""With an empty line, and one that begins as an item of a list does."""
STEPS = "1. Write this:\n   ```python\n{}\n   ```\n2. Run it:\n\n    ```sh\n    python f.py\n    ```\n3. Done.\n"
WORDS = (
    "**bold with *italic* in it**, ***both***, **at *its end***, __so__ and _so_, snake_case_name, 2 * 3 * 4, "
    "https://a.example/b_c_d, [named](https://c.example)."
)
TABLE = "\n".join(["| birches " * 8 + "|", "|---" * 8 + "|", "| 4,100 " * 8 + "|"])


def test_code_in_a_list_is_whole_and_words_are_marked(server: Server) -> None:
    steps = STEPS.format("\n".join("   " + line if line else "" for line in CODE.split("\n")))
    with chromium() as driver:
        opened(driver, server, answered("Steps", steps + "\n" + WORDS))
        told = "return [...document.querySelectorAll(arguments[0])].map(each => each.textContent)"
        assert driver.execute_script(told, ".prose pre") == [CODE, "python f.py"]
        assert driver.execute_script(told, ".prose > ol > li:first-child")[0].startswith("Write this:")
        assert driver.execute_script(told, ".prose strong") == ["bold with italic in it", "both", "at its end", "so"]
        assert driver.execute_script(told, ".prose em") == ["italic", "both", "its end", "so"]
        links = driver.execute_script("return [...document.querySelectorAll('.prose a')].map(each => each.href)")
        assert links == ["https://a.example/b_c_d", "https://c.example/"]
        assert "snake_case_name, 2 * 3 * 4" in driver.execute_script(told, ".prose")[0]


def test_a_phone_scrolls_a_table_and_shows_one_panel_at_a_time(server: Server) -> None:
    with chromium(390, 780) as driver:
        opened(driver, server, answered("Trees", TABLE))
        lines = "[...document.querySelectorAll('.prose td')].map(each => each.getClientRects()[0].height)"
        assert max(driver.execute_script(f"return {lines}")) < 50  # no word is broken into two lines
        assert driver.execute_script(
            "const e = document.querySelector('.scroll'); return e.scrollWidth > e.clientWidth"
        )
        assert driver.execute_script("return document.documentElement.scrollWidth") <= 390
        open_panels = "return document.querySelector('.chat').className"
        for name in ("chat-side", "chat-settings"):
            driver.find_element("css selector", f"[aria-controls={name}]").click()
        assert driver.execute_script(open_panels) == "chat with-settings"
        assert violations(driver) == []
        driver.execute_script("document.querySelector('.thread').focus()")  # which nothing covers then
        assert driver.execute_script(open_panels) == "chat"
        told = "return [...document.querySelectorAll('.bar-top [aria-expanded=true]')].length"
        assert driver.execute_script(told) == 0


def test_the_narrowest_window_cuts_nothing_off(server: Server) -> None:
    with chromium(320, 640) as driver:
        opened(driver, server)
        right = "[...document.querySelectorAll('.box, .bar-top button')].map(e => e.getBoundingClientRect().right)"
        assert max(driver.execute_script(f"return {right}")) <= 320
        driver.get(server.url + "/#inside")
        until(driver, "document.querySelector('.tile small')?.textContent === 'at most 0 in the last minute'")


def test_another_chat_can_be_asked_once_the_first_is_answered(server: Server) -> None:
    with chromium() as driver:
        opened(driver, server, answered("Other", "Yes."))
        driver.find_element("css selector", "[name=extra]").send_keys('{"ignore_eos": true, "max_tokens": 1500}')
        driver.find_element("css selector", ".side .new").click()
        driver.find_element("css selector", "#chat-input").send_keys("Go on", Keys.ENTER)
        until(driver, "document.querySelector('#chat-send').textContent === 'Stop'")
        opens = "[...document.querySelectorAll('.chats .open')].find(each => each.textContent === 'Other').click()"
        driver.execute_script(opens)
        driver.find_element("css selector", "#chat-input").send_keys("And now?", Keys.ENTER)
        until(driver, "document.querySelector('.composer .notice').textContent.startsWith('“Go on” is being answered')")
        assert driver.find_element("css selector", "#chat-input").get_attribute("value") == "And now?"
        until(driver, "document.querySelector('#chat-send').textContent === 'Send'")
        assert driver.execute_script("return document.querySelectorAll('.foot button:disabled').length") == 0
        driver.find_element("css selector", "#chat-input").send_keys(Keys.ENTER)
        until(driver, "document.querySelectorAll('.message').length === 4")


def test_who_typed_a_wrong_key_is_told_that_it_is_wrong() -> None:
    with contextlib.closing(Server("--api-key=sesame", "--shutdown-timeout=1")) as running, chromium() as driver:
        driver.get(running.url + "/")
        until(driver, "document.querySelector('dialog[open]')")
        field = driver.find_element("css selector", "#key-input")
        field.send_keys("seasame", Keys.ENTER)
        until(driver, "document.querySelector('dialog[open] #key-why')?.textContent.includes('does not take this key')")
        assert violations(driver) == []
        field.clear()
        field.send_keys("sesame", Keys.ENTER)
        until(driver, "document.querySelector('#chat-model option')")
        assert not driver.find_element("css selector", ".composer .notice").is_displayed()
