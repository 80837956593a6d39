"""The chat page in a real browser, against a gateway that answers by rule."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from urllib.error import HTTPError

import pytest
from private_llm_gateway.app import CONTENT_SECURITY_POLICY
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from private_llm.config import PrivateConfig
from tests.gateway.browser import PHONE, browser, element, look, origins, texts, until
from tests.gateway.page_server import ATTACK, INFO, TOKEN, Fake, served
from tests.gateway.small_gateway import TOKEN as TOKEN_OF_GATEWAY
from tests.gateway.small_gateway import bundled, serving

ANSWER = "The capital is Pâris.\n  Next line."
IDLE = "document.querySelector('#stop').hidden"


@pytest.fixture(scope="module")
def chrome() -> Iterator[WebDriver]:
    with browser() as found:
        yield found


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def page(chrome: WebDriver, fake: Fake) -> Iterator[WebDriver]:
    """The page, connected; nothing of it may leave the origin or break its policy."""
    with served(fake.app()) as address:
        chrome.get("about:blank")
        origins(chrome)
        chrome.get_log("browser")
        chrome.get(f"{address}/#token={TOKEN}")
        until(chrome, "document.querySelector('#model').textContent.startsWith('tiny-model')")
        yield chrome
        assert origins(chrome) == {address}
        assert not [line for line in chrome.get_log("browser") if "Security Policy" in line["message"]]
        assert chrome.title == "Private chat"
        chrome.get("about:blank")


def ask(page: WebDriver, text: str, wait: bool = True) -> None:
    element(page, "#question").send_keys(text, Keys.ENTER)
    if wait:
        until(page, IDLE)


def test_files_come_with_headers_and_nothing_else_does(fake: Fake) -> None:
    with served(fake.app()) as address:
        for path, kind in (("/", "text/html"), ("/page/chat.js", "text/javascript"), ("/page/chat.css", "text/css")):
            with urllib.request.urlopen(address + path) as found:
                assert found.headers["Content-Security-Policy"] == CONTENT_SECURITY_POLICY
                assert found.headers["X-Content-Type-Options"] == "nosniff"
                assert found.headers["Referrer-Policy"] == "no-referrer"
                assert found.headers.get_content_type() == kind
        for path in ("/page/app.py", "/page/..%2fapp.py", "/page/", "/page/nothing.js"):
            with pytest.raises(HTTPError) as refused:
                urllib.request.urlopen(address + path)
            assert refused.value.code == 404
            refused.value.close()
    for source in ("'unsafe-inline'", "'unsafe-eval'", "*", "http", "data:"):
        assert source not in CONTENT_SECURITY_POLICY


def test_text_streams_in_with_its_cost(page: WebDriver, fake: Fake) -> None:
    ask(page, "slow", wait=False)
    until(page, "document.querySelector('.assistant .text').textContent.startsWith('The capital')")
    assert element(page, ".assistant").get_attribute("aria-busy") == "true"
    assert element(page, "#stop").is_displayed()
    fake.go_on.set()
    until(page, IDLE)
    assert texts(page, ".assistant .text") == [ANSWER]
    assert texts(page, ".user .text") == ["slow"]
    assert element(page, ".assistant").get_attribute("aria-busy") is None
    assert texts(page, "#cost dd")[:3] == ["3.46 tokens/s", "8.64 MB", "2,100"]
    (spent,) = texts(page, ".spent")
    assert spent.startswith("7 tokens · ")
    assert spent.endswith(" s · 8.64 MB sent · 2,100 rounds")
    assert page.switch_to.active_element.get_attribute("id") == "question"
    ask(page, "long")
    assert texts(page, ".spent")[1].endswith(" · cut at its longest")
    assert texts(page, "#total") == ["This conversation so far: 17.3 MB over all links, 4,200 rounds."]
    roles = [[turn["role"] for turn in body["messages"]] for body in fake.asked]
    assert roles == [["user"], ["user", "assistant", "user"]]
    assert fake.asked[1]["messages"][1]["content"] == ANSWER
    assert fake.asked[0]["stream"] is True
    assert fake.asked[0]["model"] == "tiny-model"


def test_the_token_of_the_address_never_reaches_the_server(page: WebDriver, fake: Fake) -> None:
    assert TOKEN not in page.current_url
    assert not [address for address in fake.addresses if TOKEN in address]
    page.refresh()
    until(page, "document.querySelector('#model').textContent.startsWith('tiny-model')")


def test_who_holds_what_is_shown(page: WebDriver) -> None:
    assert texts(page, "#parties .party h3") == [party["name"] for party in INFO["parties"]]
    shown = element(page, "#protection").text
    for party in INFO["parties"]:
        assert party["host"] in shown
        assert party["holds"] in shown
    assert INFO["sentence"] in shown
    assert "protects nobody" in element(page, "#warning").text
    look(page, *PHONE)
    try:
        assert not element(page, "#protection").is_displayed()
        assert element(page, "#warning").is_displayed()
        element(page, "summary").click()
        assert element(page, "#protection").is_displayed()
        assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        widths = "return [...document.querySelectorAll('#cost dt')].map(label => label.getBoundingClientRect().width)"
        assert min(page.execute_script(widths)) > 10, "figures have their labels beside them"
    finally:
        look(page, 1200, 800)


def test_stopping_ends_the_request_and_keeps_the_text(page: WebDriver, fake: Fake) -> None:
    for stop in (lambda: element(page, "#stop").click(), lambda: element(page, "body").send_keys(Keys.ESCAPE)):
        before = len(texts(page, ".spent"))
        ask(page, "endless", wait=False)
        until(page, "[...document.querySelectorAll('.assistant .text')].at(-1).textContent.includes('word3')")
        stop()
        until(page, f"{IDLE} && document.querySelectorAll('.spent').length === {before + 1}")
        assert texts(page, ".spent")[-1].endswith(" · stopped")
        text = texts(page, ".assistant .text")[-1]
        assert text.startswith("word0 word1 word2 word3")
        assert len(text.split()) < 2000
    ask(page, "go on")
    assert fake.asked[-1]["messages"][-2] == {"role": "assistant", "content": text}
    WebDriverWait(page, 15).until(lambda _: fake.gone == 2, "the server hears of it")
    assert not element(page, "#trouble").is_displayed()


def test_whoever_waits_long_for_the_first_word_is_told_why(page: WebDriver, fake: Fake) -> None:
    shown = "getComputedStyle(document.querySelector('.assistant .text'), '::after').content"
    ask(page, "late", wait=False)
    until(page, f"document.querySelector('.assistant') && {shown} === '\"computing on shares\"'")
    until(page, f"{shown}.includes('the first answer on a machine takes longer')")
    fake.go_on.set()
    until(page, IDLE)
    assert texts(page, ".assistant .text") == [ANSWER]
    assert page.execute_script(f"return {shown}") in ("none", "normal")


def test_text_is_never_markup(page: WebDriver, fake: Fake) -> None:
    ask(page, "attack")
    assert texts(page, ".assistant .text") == [ATTACK]
    ask(page, ATTACK)
    assert texts(page, ".user .text") == ["attack", ATTACK]
    ask(page, "fail")
    assert ATTACK in texts(page, "#trouble")[0]
    assert page.execute_script("return document.querySelectorAll('main img, main script').length") == 0
    assert not [address for address in fake.addresses if "attack" in address]


@pytest.mark.parametrize(
    ("text", "kept", "words"),
    [
        ("fail", "this was said ", "Party 1 stopped."),
        ("end", "half ", "The gateway was stopped. "),
        ("cut", "half ", "The connection ended before the answer did."),
        ("busy", "", "Too many requests wait. Try again in 7 s."),
    ],
)
def test_failures_are_told_in_words(page: WebDriver, fake: Fake, text: str, kept: str, words: str) -> None:
    ask(page, text)
    said = texts(page, "#trouble")[0]
    assert said.startswith(words)
    if kept:
        assert said.endswith("The text so far was kept.")
        assert texts(page, ".assistant .text") == [kept]
        assert texts(page, ".spent")[0].endswith(" · incomplete")
        element(page, "#question").clear()
    else:
        assert said.endswith("Your question is in the box below.")
        assert texts(page, ".text") == []
        assert element(page, "#question").get_property("value") == text
        element(page, "#question").clear()
    ask(page, "again")
    assert texts(page, ".assistant .text")[-1] == ANSWER
    assert not element(page, "#trouble").is_displayed()
    assert len(fake.asked[-1]["messages"]) == (3 if kept else 1)


def test_a_gateway_that_is_gone(chrome: WebDriver, fake: Fake) -> None:
    with served(fake.app()) as address:
        chrome.get(f"{address}/#token={TOKEN}")
        until(chrome, "document.querySelector('#model').textContent.startsWith('tiny-model')")
    ask(chrome, "are you there?")
    assert texts(chrome, "#trouble")[0].startswith("The gateway does not answer. Is it still running?")
    assert element(chrome, "#question").get_property("value") == "are you there?"
    chrome.get("about:blank")


def test_a_token_is_asked_for_once(chrome: WebDriver, fake: Fake) -> None:
    with served(fake.app()) as address:
        chrome.get(address)
        until(chrome, "document.querySelector('#door').open")
        assert "The access token is missing or wrong." in element(chrome, "#door-text").text
        for given in ("wrong", TOKEN):
            element(chrome, "#token").send_keys(given, Keys.ENTER)
            wanted = (
                "!document.querySelector('#door').open" if given == TOKEN else "document.querySelector('#door').open"
            )
            until(chrome, f"{wanted} && document.querySelector('#token').value === ''")
        until(chrome, "document.querySelector('#model').textContent.startsWith('tiny-model')")
        chrome.refresh()
        until(chrome, "document.querySelector('#model').textContent.startsWith('tiny-model')")
        assert not chrome.execute_script("return document.querySelector('#door').open")
        assert chrome.execute_script("return localStorage.length") == 0
        chrome.get("about:blank")


def test_several_machines_and_no_token(chrome: WebDriver) -> None:
    fake = Fake(token="", info={**INFO, "one_machine": False})
    with served(fake.app()) as address:
        chrome.get(address)
        until(chrome, "document.querySelector('#model').textContent.startsWith('tiny-model')")
        assert not element(chrome, "#warning").is_displayed()
        chrome.get("about:blank")


def test_keys_and_a_new_chat(page: WebDriver, fake: Fake) -> None:
    box = element(page, "#question")
    low = box.size["height"]
    box.send_keys("a", Keys.SHIFT + Keys.ENTER, Keys.NULL, "b")
    assert box.get_property("value") == "a\nb"
    assert box.size["height"] > low
    assert fake.asked == []
    box.send_keys(Keys.ENTER)
    until(page, IDLE)
    assert fake.asked[0]["messages"] == [{"role": "user", "content": "a\nb"}]
    box.send_keys("   ", Keys.ENTER)
    assert len(fake.asked) == 1, "nothing is no question"
    box.clear()
    ask(page, "endless", wait=False)
    until(page, "document.querySelectorAll('.assistant').length === 2")
    element(page, "#new").click()
    assert texts(page, "article") == []
    assert element(page, "#send").is_displayed()
    ask(page, "fresh")
    assert fake.asked[-1]["messages"] == [{"role": "user", "content": "fresh"}]
    assert texts(page, ".assistant .text") == [ANSWER], "what was given up writes nowhere"


def test_how_it_answers_is_a_choice(page: WebDriver, fake: Fake) -> None:
    """Greedy and of a length that one waits for, unless somebody wants it otherwise."""
    ask(page, "first")
    assert (fake.asked[-1]["temperature"], fake.asked[-1]["max_tokens"]) == (0, 256)
    temperature, longest = element(page, "#temperature"), element(page, "#longest")
    for field, value in ((temperature, "0.7"), (longest, "12")):
        field.clear()
        field.send_keys(value)
    ask(page, "second")
    assert (fake.asked[-1]["temperature"], fake.asked[-1]["max_tokens"]) == (0.7, 12)
    temperature.clear()
    longest.clear()
    ask(page, "third")
    assert fake.asked[-1]["temperature"] == 0
    assert "max_tokens" not in fake.asked[-1]
    temperature.send_keys("7")
    before = len(fake.asked)
    element(page, "#question").send_keys("too hot", Keys.ENTER)
    assert page.execute_script("return document.querySelector('#temperature').validity.rangeOverflow")
    assert len(fake.asked) == before


def test_an_answer_takes_the_room_that_is_left(page: WebDriver, fake: Fake) -> None:
    ask(page, "nearly full")
    assert texts(page, ".assistant .text") == [ANSWER]
    assert ["max_tokens" in body for body in fake.asked] == [True, False]
    ask(page, "full")
    assert texts(page, "#trouble")[0].startswith("Too long.")
    element(page, "#question").clear()


def test_everything_has_a_name(page: WebDriver) -> None:
    for selector in ("button", "textarea", "input", "[role]", "aside", "section"):
        for found in page.find_elements("css selector", selector):
            assert found.accessible_name or found.aria_role in ("note", "alert", "none"), found.get_attribute(
                "outerHTML"
            )
    assert page.execute_script("return document.documentElement.lang") == "en"


def test_a_private_model_answers_and_is_stopped(chrome: WebDriver) -> None:
    """The real gateway, with three parties as threads."""
    served_model = bundled(PrivateConfig(party_mode="threads", timeout_s=60))
    with serving(served_model) as gateway:
        chrome.get(f"{gateway.url}/#token={TOKEN_OF_GATEWAY}")
        until(chrome, "document.querySelector('#model').textContent === 'demo · protocol trio'")
        assert element(chrome, "#warning").is_displayed()
        assert len(texts(chrome, "#parties .party")) == 3
        ask(chrome, "My fellow citizens", wait=False)
        until(chrome, "document.querySelector('.assistant .text')?.textContent.length > 20", 60)
        assert "MB" in texts(chrome, "#bytes")[0]
        element(chrome, "#stop").click()
        until(chrome, "document.querySelector('.spent')?.textContent.endsWith('stopped')")
        asked = {"model": "demo", "messages": [{"role": "user", "content": "My fellow"}], "max_tokens": 2}
        made = gateway.client().chat.completions.create(**asked)
        assert made.usage is not None
        assert made.usage.completion_tokens == 2, "the session is there for the next"
        assert not [line for line in chrome.get_log("browser") if "Security Policy" in line["message"]]
        chrome.get("about:blank")
