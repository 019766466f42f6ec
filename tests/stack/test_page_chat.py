"""The page's chat in a real browser, over a real server of the demo model. PAGE_SHOTS names a folder for pictures."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stack import Server, thinking_demo, wait_until

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not here: pip install 'quire[test]'")
ActionChains = pytest.importorskip("selenium.webdriver.common.action_chains").ActionChains
KEYS = pytest.importorskip("selenium.webdriver.common.keys").Keys
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium with its chromedriver here")
SHOTS = os.environ.get("PAGE_SHOTS")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(*thinking_demo(tmp_path_factory.mktemp("template")))
    try:
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


class Page:
    """A fresh page: nothing is kept in the browser."""

    def __init__(self, browser: Any, url: str, width: int = 1360, height: int = 860):
        self.browser = browser
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})  # fmt: skip
        browser.get(url + "/page/icon.svg")
        browser.execute_script("localStorage.clear(); sessionStorage.clear()")
        browser.get_log("browser")
        browser.get(url + "/")
        self.until(lambda: self.all("#chat-model option, dialog[open]"), "models are listed, or a key is asked for")

    def all(self, selector: str) -> list[Any]:
        return self.browser.find_elements("css selector", selector)

    def one(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def script(self, text: str, *args: Any) -> Any:
        return self.browser.execute_script(text, *args)

    def until(self, condition: Callable[[], Any], what: str) -> None:
        wait_until(condition, what, 30)

    def say(self, text: str) -> None:
        self.one("#chat-input").send_keys(text, KEYS.ENTER)
        self.until_answered()

    def until_answered(self) -> None:
        self.until(lambda: self.one("#chat-send").text == "Send" and self.all(".message.assistant .foot, .variant"),
                   "an answer has ended")  # fmt: skip

    def press(self, name: str, index: int = -1) -> None:
        self.script(
            "[...document.querySelectorAll('button')].filter(each => [each.textContent, each.ariaLabel].includes("
            "arguments[0])).at(arguments[1]).click()", name, index)  # fmt: skip

    def type(self, *keys: str) -> None:
        """Keys to what has the focus."""
        self.browser.switch_to.active_element.send_keys(*keys)

    def tab_to(self, name: str, key: str = KEYS.TAB) -> None:
        """Press Tab until an element of this id, field's name or label has the focus."""
        told = "const e = document.activeElement; return [e.id, e.name, e.ariaLabel, e.textContent]"
        for _ in range(60):
            if name in self.script(told):
                return
            self.type(key)
        raise AssertionError(f"no {name} by {key!r}")

    def listen(self) -> None:
        """Keep the bodies of what the page asks from now on, as ``window.asked``."""
        self.script(
            "window.asked = []; const usual = window.fetch; window.fetch = (url, options) => {"
            "if (options?.body) asked.push(JSON.parse(options.body)); return usual(url, options) }"
        )

    def fill(self, selector: str, text: str) -> None:
        field = self.one(selector)
        field.clear()
        field.send_keys(text)

    def check_rules(self) -> None:
        """axe's rules, and no error in the console (what the policy refuses is one)."""
        axe = pytest.importorskip("axe_core_python")
        self.script(next(Path(axe.__file__).parent.rglob("axe.min.js")).read_text("utf-8"))
        found = self.browser.execute_async_script(
            "const done = arguments[0]; axe.run().then(r => done(r.violations.map(v => "
            "[v.id, v.nodes.map(n => n.target.join(' '))])), e => done([String(e)]))"
        )
        assert found == []

    def shoot(self, name: str) -> None:
        if SHOTS:
            self.browser.save_screenshot(str(Path(SHOTS) / f"{name}.png"))


def texts(page: Page, selector: str) -> list[str]:
    return page.script("return [...document.querySelectorAll(arguments[0])].map(each => each.innerText)", selector)


@pytest.mark.timeout(120)
def test_a_conversation_is_asked_edited_regenerated_and_kept(browser: Any, server: Server) -> None:
    page = Page(browser, server.url)
    page.fill("[data-of=a][name=temperature]", "0")
    page.say("Tell me about the harbour")
    answer = page.one(".message.assistant .prose").text
    assert answer and "tokens" in texts(page, ".figures")[-1]
    page.press("Regenerate the answer")
    page.until_answered()
    assert page.one(".message.assistant .prose").text == answer
    page.press("Edit the message", 0)
    page.fill(".editor textarea", "Tell me about the cat")
    page.press("Save and ask again")
    page.until_answered()
    assert texts(page, ".said") == ["Tell me about the cat"] and len(page.all(".message")) == 2
    page.press("Rename Tell me about the harbour")
    page.one(".chats input").send_keys("Cats", KEYS.ENTER)  # whose text is selected; clearing it would blur it
    page.press("New chat")
    page.say("Another")
    browser.refresh()
    page.until(lambda: texts(page, ".chats .open") == ["Another", "Cats"], "both are kept")
    page.press("Cats")
    page.press("Delete Cats")
    page.press("Press again to delete Cats")
    assert texts(page, ".chats .open") == ["Another"]
    wrong = [each["message"] for each in browser.get_log("browser") if each["level"] == "SEVERE"]
    assert [
        each for each in wrong if "favicon.ico" not in each
    ] == []  # asked for beside the icon, which was opened alone


@pytest.mark.timeout(120)
def test_an_answer_goes_on_with_another_token(browser: Any, server: Server) -> None:
    page = Page(browser, server.url)
    page.fill("[data-of=a][name=temperature]", "0")
    page.one("[name=logprobs]").click()
    page.say("And the cat?")
    before = texts(page, ".token")
    page.script("arguments[0].focus()", page.all(".token")[0])
    browser.switch_to.active_element.send_keys(KEYS.ARROW_RIGHT)
    browser.switch_to.active_element.send_keys(KEYS.ENTER)  # into the alternatives
    assert len(page.all("button.alternative")) == 5
    hovered = page.all(".token")[2]
    ActionChains(browser).move_to_element(hovered).perform()
    assert hovered.text.strip() in page.one(".alternatives p").text
    page.script("arguments[0].focus()", page.all(".token")[-1])  # the end of the turn, which nothing can follow
    assert (len(page.all(".alternative")), len(page.all("button.alternative"))) == (5, 4)
    page.script("arguments[0].focus()", page.all(".token")[0])
    page.type(KEYS.ARROW_RIGHT)
    page.type(KEYS.ENTER)
    page.shoot("page-tokens")
    browser.switch_to.active_element.send_keys(KEYS.TAB, KEYS.ENTER)
    page.until(lambda: texts(page, ".token") and texts(page, ".token") != before, "it went on")
    page.until_answered()
    after = texts(page, ".token")
    assert after[0] == before[0] and after[1] != before[1]
    page.check_rules()


@pytest.mark.timeout(120)
def test_stop_compare_and_a_phone_in_the_dark(browser: Any, server: Server) -> None:
    page = Page(browser, server.url)
    page.fill("[name=extra]", '{"ignore_eos": true, "max_tokens": 400}')
    page.one("#chat-input").send_keys("Go on", KEYS.ENTER)
    page.one("#chat-send").click()  # which says Stop
    page.until_answered()
    assert "stopped" in texts(page, ".figures")[-1] or "cut off" in texts(page, ".figures")[-1]
    page.fill("[name=extra]", "[")
    page.one("#chat-input").send_keys("Wrong", KEYS.ENTER)
    assert "Other fields is not valid JSON" in page.one(".composer .notice").text
    page.one("#chat-input").clear()
    page.fill("[name=extra]", "{}")
    page.one("[name=compare]").click()
    page.fill("[data-of=a][name=temperature]", "0")
    page.fill("[data-of=b][name=temperature]", "1.5")
    page.press("New chat")
    page.listen()
    page.say("Tell me about the sea")
    first, second = page.script("return window.asked")
    assert first["seed"] == second["seed"] and (first["temperature"], second["temperature"]) == (0, 1.5)
    assert len(page.all(".variant .prose")) == 2
    page.shoot("page-compare")
    page.press("Keep B")
    assert not page.all(".variant") and len(page.all(".message")) == 2
    page = Page(browser, server.url, 390, 780)
    page.script("document.documentElement.dataset.theme = 'dark'")
    page.say("Tell me about the harbour")
    for name, first in (("Chats", "New chat"), ("Settings", "system")):
        page.tab_to(name, KEYS.SHIFT + KEYS.TAB)
        page.type(KEYS.ENTER)
        page.tab_to(first)
        page.check_rules()
        page.shoot("page-phone-" + name.lower())
        page.type(KEYS.ESCAPE)
        assert page.script("return document.activeElement.textContent") == name
    assert page.script("return document.documentElement.scrollWidth") <= 390
    page.shoot("page-phone")
    page.check_rules()


@pytest.mark.timeout(120)
def test_everything_is_done_by_keyboard(browser: Any, server: Server, tmp_path: Path) -> None:
    page = Page(browser, server.url)
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    page.tab_to("Skip to the content")
    page.type(KEYS.ENTER)
    page.tab_to("temperature")
    page.type("0")
    back = KEYS.SHIFT + KEYS.TAB
    page.tab_to("logprobs", back)
    page.type(" ")
    page.tab_to("chat-input", back)
    page.type("And the cat?", KEYS.ENTER)
    page.until_answered()
    answer = texts(page, ".token")
    page.tab_to("Regenerate the answer", back)
    page.type(KEYS.ENTER)
    page.until_answered()
    assert texts(page, ".token") == answer and page.script("return document.activeElement.className") == "thread"
    page.tab_to("Edit the message")
    page.type(KEYS.ENTER)
    page.tab_to("Message")
    page.type(KEYS.END, " And the dog?")
    page.tab_to("Save and ask again")
    page.type(KEYS.ENTER)
    page.until_answered()
    assert texts(page, ".said") == ["And the cat? And the dog?"]
    page.tab_to("Rename And the cat?", back)
    page.type(KEYS.ENTER)
    page.type("Animals", KEYS.ENTER)
    page.tab_to("Export")
    page.type(KEYS.ENTER)
    file = tmp_path / "quire-chats.json"
    page.until(file.exists, "the file is written")
    assert [each["title"] for each in json.loads(file.read_text())["conversations"]] == ["Animals"]
    page.tab_to("Delete Animals", back)
    page.type(KEYS.ENTER)
    page.type(KEYS.ENTER)
    assert texts(page, ".chats .open") == ["New chat"] and not page.all(".message")
    page.one("input[type=file]").send_keys(str(file))
    page.until(lambda: "Animals" in texts(page, ".chats .open"), "the file is imported")
    page.tab_to("Animals", back)
    page.type(KEYS.ENTER)
    page.tab_to("theme-button", back)
    page.type(KEYS.ENTER)  # light
    page.type(KEYS.ENTER)
    assert page.script("return getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 26)"
    browser.refresh()
    page.until(lambda: page.all(".token"), "the chat is shown again")
    assert page.script("return document.documentElement.dataset.theme") == "dark"
    page.tab_to("tab-chat")
    page.type(KEYS.ARROW_RIGHT)
    page.until(lambda: page.all(".inside"), "the other view is shown")
    page.type(KEYS.ARROW_LEFT)
    page.until(lambda: page.all(".token"), "the chat is shown again")
    page.script("arguments[0].focus()", page.all(".token")[1])
    page.check_rules()
    page.shoot("page-dark")


WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather", "parameters": WEATHER},
}
THINK = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 5}


def token(text: str, *others: str) -> dict[str, Any]:
    top = [{"bytes": list(each.encode()), "logprob": -1} for each in (text, *others)]
    return {**top[0], "top": top}


TABLE = "| tree | count |\n|---|---|\n| pine | 4,100 |\n| birch | 380 |"
PICTURE = {"title": "Trees of a park", "settings": {}, "messages": [
    {"role": "user", "content": "Which trees stand in the park, and how do I count them?"},
    {"role": "assistant", "content": "", "reasoning": "The list of trees is in the city's register.",
     "calls": [{"id": "c", "name": "trees_of", "arguments": '{"park":"Vingis"}'}]},
    {"role": "tool", "call": "c", "content": '{"pine": 4100, "birch": 380}'},
    {"role": "assistant",
     "content": f"Mostly **pines**:\n\n{TABLE}\n\n```python\nsum(trees_of(park='Vingis').values())\n```"}]}  # fmt: skip


@pytest.mark.timeout(120)
def test_calls_and_thoughts_are_folded_and_go_on_from_a_token(browser: Any, server: Server, tmp_path: Path) -> None:
    page = Page(browser, server.url)
    page.fill("[data-of=a][name=temperature]", "0")
    page.fill("[name=tools]", json.dumps([TOOL]))
    page.one("[name=logprobs]").click()
    page.say("what is the weather in Paris?")
    shown = "return document.querySelector('.call pre').textContent"
    assert json.loads(page.script(shown)) == {"city": "Paris"}
    at = texts(page, ".token").index("P")
    page.script("arguments[0].focus()", page.all(".token")[at])
    browser.switch_to.active_element.send_keys(KEYS.ENTER)
    browser.switch_to.active_element.send_keys(KEYS.TAB, KEYS.ENTER)  # the second likeliest
    page.until_answered()
    city = json.loads(page.script(shown))["city"]
    assert city and city[0] != "P" and "calls a tool" in texts(page, ".figures")[-1]
    page.one("[name=logprobs]").click()
    page.fill(".call-open textarea", "sunny")
    page.press("Send results")
    page.until(lambda: page.all(".message.tool"), "the result is shown")
    page.until_answered()
    assert texts(page, "details.fold summary") == ["Calls get_weather", "Result"]
    page.fill("[name=tools]", "")
    page.fill("[name=extra]", json.dumps(THINK))
    page.say("And in Rome?")
    thought = page.script("return [...document.querySelectorAll('.message:last-child .fold')].map(e => e.textContent)")
    assert len(thought) == 1 and thought[0].startswith("Thoughts") and "think>" not in page.one(".column").text

    tokens = [token("<think>"), token("I"), token(" think", " know"), token("</think>"), token("Yes"), token(".")]
    said = {"role": "assistant", "content": "Yes.", "reasoning": "I think", "tokens": tokens}
    thinks = {"title": "Is it far to Rome?", "settings": {"logprobs": True, "extra": '{"max_tokens": 8}'}}
    chats = [{**thinks, "updated": 9e12, "messages": [{"role": "user", "content": "Well?"}, said]}, PICTURE]
    file = tmp_path / "chats.json"
    file.write_text(json.dumps({"quire": 1, "conversations": chats}))
    page.one("input[type=file]").send_keys(str(file))
    page.until(lambda: "Imported 2 conversations." in texts(page, ".composer .notice"), "the file is imported")
    page.press("Trees of a park")
    page.script("document.querySelectorAll('.call').forEach(each => each.open = true)")
    page.script("const thread = document.querySelector('.thread'); thread.scrollTop = thread.scrollHeight")
    page.shoot("page-light")
    clipboard = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    browser.execute_cdp_cmd("Browser.grantPermissions", {"permissions": clipboard})
    read = "navigator.clipboard.readText().then(arguments[0], arguments[0])"
    for name, text in (("Copy the code", "sum(trees"), ("Copy the message", 'trees_of({"park":"Vingis"})')):
        page.press(name, -1 if "code" in name else 1)
        page.until(lambda text=text: text in browser.execute_async_script(read), "it is copied")
    page.fill("[name=system]", "Be brief.")
    page.listen()
    page.say("And how many in all?")
    (body,) = page.script("return window.asked")
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert [body["messages"][2][name] for name in ("reasoning", "content")] == [PICTURE["messages"][1]["reasoning"], ""]
    page.fill("[name=system]", "")
    page.press("Is it far to Rome?")
    page.script("arguments[0].click()", page.all(".token")[2])
    page.script("arguments[0].click()", page.all("button.alternative")[1])
    page.until_answered()
    assert page.script("return document.querySelector('.fold .prose').textContent").startswith("I know")
    assert texts(page, ".token")[:3] == ["<think>", "I", " know"] and len(page.all(".token")) > 3


HOSTILE = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>\n\n[x](javascript:window.hit=1) **bold**\n\n'


@pytest.mark.timeout(120)
def test_what_a_model_writes_is_shown_and_never_run(browser: Any, server: Server) -> None:
    page = Page(browser, server.url)
    calls = [{"id": "c", "name": "weather", "arguments": '{"city":"Riga"}'}]
    answer = HOSTILE + "- one\n- two\n\n```python\nprint(1)\n```\n"
    chat = {"id": "t", "title": "Show me some HTML", "updated": 1, "settings": {}, "messages": [
        {"role": "user", "content": "Show me some HTML"},
        {"role": "assistant", "content": answer, "reasoning": "Hm.", "calls": calls}]}  # fmt: skip
    page.script("localStorage.setItem('quire.chat.t', arguments[0])", json.dumps(chat))
    browser.refresh()
    page.until(lambda: page.all(".prose strong") and page.all("#chat-model option"), "the chat is shown")
    assert not page.script("return window.hit") and not page.all(".prose img, .prose script, .prose a")
    assert "<img src=x" in page.one(".message.assistant > .prose").text and len(page.all(".prose li")) == 2
    assert texts(page, "details.fold summary") == ["Thoughts", "Calls weather"]
    page.check_rules()
    page.fill(".call-open textarea", "sunny")
    page.press("Send results")
    page.until(lambda: page.all(".message.tool") and page.one("#chat-send").text == "Send", "the model has answered")
    assert len(page.all(".message")) == 4 and not page.all(".notice.bad:not([hidden])")


def kept(title: str, updated: int, **answer: Any) -> str:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi", **answer}]
    return json.dumps(
        {"id": title, "title": title, "updated": updated, "settings": {"a": 5, "system": 5}, "messages": messages}
    )


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_damaged_chats_hide_no_others_and_a_long_hostile_answer_is_drawn(browser: Any, server: Server) -> None:
    page = Page(browser, server.url)
    ticks = "".join("`" * count + "a" for count in range(1, 800))  # none of which closes another
    hostile = (
        f"{ticks}\n# a{' ' * 300_000}b C# ##\n\n" + "a\n\n" * 130_000
    )  # minutes where each place looks at all others
    chats = {"whole": kept("Whole", 1), "torn": "{", "thought": kept("Thought", 3, reasoning=5),
             "pair": kept("Pair", 4, variants="ab"), "hostile": kept("Hostile", 2, content=hostile)}  # fmt: skip
    for name, text in chats.items():
        page.script("localStorage.setItem('quire.chat.' + arguments[0], arguments[1])", name, text)
    browser.refresh()
    page.until(lambda: page.all("#chat-model option"), "the page is there")
    assert texts(page, ".chats .open") == ["Hostile", "Whole"]
    assert page.script("return document.querySelectorAll('.prose > p').length") == 130_002
    assert page.one(".prose .heading").text.endswith("b C#")
    page.press("Whole")
    page.say("And now?")
    assert len(page.all(".message")) == 4
    page.script("Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('none') }})")
    page.press("Delete Whole")
    page.press("Press again to delete Whole")  # where the browser keeps nothing, as one may tell it
    assert not page.all(".message")


@pytest.mark.timeout(120)
def test_a_key_is_asked_for_and_sent(browser: Any) -> None:
    server = Server("--api-key=sesame")
    try:
        page = Page(browser, server.url)
        assert "needs an API key" in page.one("#key-why").text
        page.check_rules()
        page.shoot("page-key")
        page.one("#key-input").send_keys("сезам", KEYS.ENTER)  # which no header can hold
        page.until(lambda: "copy it again" in page.one("#key-why").text, "the wrong key is told")
        page.one("#key-input").clear()
        page.one("#key-input").send_keys("sesame", KEYS.ENTER)
        page.until(lambda: page.all("#chat-model option"), "models are listed")
        assert page.script("return [sessionStorage.getItem('quire.key'), localStorage.getItem('quire.key')]") == [
            "sesame",
            None,
        ]
        page.say("Tell me about the harbour")
        assert page.one(".message.assistant .prose").text
        page.press("Look inside")
        page.until(lambda: page.all(".inside[data-state=live]"), "the feed takes the key")
    finally:
        server.close()
