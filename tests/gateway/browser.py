"""A browser without a screen, for tests of pages; they are skipped where there is none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DESKTOP, PHONE = (1200, 800), (390, 780)


@contextmanager
def browser(dark: bool = False) -> Iterator[webdriver.Chrome]:
    """A headless Chromium. Skips the test where Chromium or its driver is missing."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("no Chromium with chromedriver on PATH (Debian: apt install chromium chromium-driver)")
    options = Options()
    options.binary_location = program
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    try:
        look(chrome, *DESKTOP, dark=dark)
        yield chrome
    finally:
        chrome.quit()


def look(chrome: webdriver.Chrome, width: int, height: int, dark: bool = False) -> None:
    """The size of the page and its colours."""
    chrome.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def element(chrome: webdriver.Chrome, selector: str) -> WebElement:
    """What a CSS selector finds first."""
    return chrome.find_element(By.CSS_SELECTOR, selector)


def texts(chrome: webdriver.Chrome, selector: str) -> list[str]:
    """The text of all that a CSS selector finds, as the document has it."""
    return [str(found.get_property("textContent")) for found in chrome.find_elements(By.CSS_SELECTOR, selector)]


def until(chrome: webdriver.Chrome, condition: str, seconds: float = 15) -> None:
    """Wait for a JavaScript expression to hold."""
    WebDriverWait(chrome, seconds, 0.02).until(lambda page: page.execute_script(f"return {condition}"), condition)


def origins(chrome: webdriver.Chrome) -> set[str]:
    """Scheme, host and port of every request since the last call, inner ones of the browser apart."""
    found = set()
    for entry in chrome.get_log("performance"):
        told = json.loads(entry["message"])["message"]
        if told["method"] == "Network.requestWillBeSent":
            url = urlsplit(told["params"]["request"]["url"])
            found.add(f"{url.scheme}://{url.netloc}")
    return found
