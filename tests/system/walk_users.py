"""The programs that `walk_gateway.py` runs at the user's place, unchanged clients all, and the model owner's plaintext.

Each takes settings, and returns what it saw as JSON; whether that is right is for the walk to say.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

QUESTION = "The history of"
LOOK_FOR = 24
"""Characters of an answer on the page, before it is stopped."""
LIKELIHOOD_TASKS = ("private_next_word", "private_which_word")
TASKS = (*LIKELIHOOD_TASKS, "private_write_on")
SENTENCES = ("The film was released in the spring", "The army crossed the river")
_TASK_FOLDER = Path(__file__).resolve().parents[2] / "examples" / "lm_eval_tasks"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def official_client(settings: dict[str, Any]) -> dict[str, Any]:
    """The `openai` package: a streamed chat, a completion with log-probabilities, vectors, and a wrong name."""
    from openai import NotFoundError, OpenAI

    client = OpenAI(base_url=f"{settings['url']}/v1", api_key=settings["token"], timeout=600, max_retries=0)
    model = client.models.list().data[0].id
    began = time.monotonic()
    text, first, usage = "", 0.0, None
    spent: dict[str, float] = {}
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], max_tokens=settings["tokens"], temperature=0,
        stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    pieces = 0
    for chunk in stream:
        piece = (chunk.choices[0].delta.content or "") if chunk.choices else ""
        first = first or (time.monotonic() - began if piece else 0.0)
        pieces += bool(piece)
        text, usage = text + piece, chunk.usage or usage
        spent = getattr(chunk, "private_llm", None) or spent
    seconds = time.monotonic() - began
    whole = client.completions.create(
        model=model, prompt=QUESTION, max_tokens=2, temperature=0, logprobs=2, echo=True
    )  # fmt: skip
    chances = whole.choices[0].logprobs
    other = OpenAI(base_url=f"{settings['encoder_url']}/v1", api_key=settings["token"], timeout=600, max_retries=0)
    vectors = other.embeddings.create(model="encoder", input=list(SENTENCES), encoding_format="float")
    try:
        client.chat.completions.create(model="no-such-model", messages=[{"role": "user", "content": "a"}])
        refused = ""
    except NotFoundError as error:
        refused = str(error)
    return {
        "model": model, "text": text, "pieces": pieces, "tokens": usage.completion_tokens if usage else 0,
        "first_s": first, "seconds": seconds, "spent": spent, "whole": whole.choices[0].text,
        "logprobs": chances.token_logprobs if chances else None,
        "vectors": [each.embedding for each in vectors.data], "refused": refused,
    }  # fmt: skip


def page(settings: dict[str, Any]) -> dict[str, Any]:
    """The chat page in a headless Chromium: a question, its answer as it streams, the cost, and the stop button."""
    program = next((found for name in _BROWSERS if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if program is None or driver is None:
        return {"skipped": "no Chromium with chromedriver on PATH (Debian: apt install chromium chromium-driver)"}
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    options = Options()
    options.binary_location = program
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))

    def until(condition: str, seconds: float) -> None:
        WebDriverWait(chrome, seconds, 0.05).until(lambda found: found.execute_script(f"return {condition}"), condition)

    def texts(selector: str) -> list[str]:
        return [str(found.get_property("textContent")) for found in chrome.find_elements(By.CSS_SELECTOR, selector)]

    try:
        chrome.get(f"{settings['url']}/#token={settings['token']}")
        until("document.querySelector('#model').textContent.includes('protocol')", 60)
        chrome.find_element(By.CSS_SELECTOR, "#question").send_keys(QUESTION, Keys.ENTER)
        seen: list[str] = []
        began = time.monotonic()
        while time.monotonic() - began < 300 and len(seen[-1] if seen else "") < LOOK_FOR:
            seen += [text for text in texts(".assistant .text")[-1:] if text and text not in seen]
            time.sleep(0.02)
        cost = texts("#cost dd")
        chrome.find_element(By.CSS_SELECTOR, "#stop").click()
        until("document.querySelector('.spent')?.textContent.endsWith('stopped')", 60)
        return {
            "seen": seen, "text": texts(".assistant .text")[-1], "cost": cost, "spent": texts(".spent")[-1],
            "parties": texts("#parties .party"), "trouble": texts("#trouble")[0], "model": texts("#model")[0],
            "warned": chrome.find_element(By.CSS_SELECTOR, "#warning").is_displayed(),
            "complaints": [line["message"] for line in _console(chrome) if line["level"] == "SEVERE"],
        }  # fmt: skip
    finally:
        chrome.quit()


def evaluation(settings: dict[str, Any]) -> dict[str, Any]:
    """lm-eval on the gateway: likelihoods and texts by /v1/completions, texts by /v1/chat/completions."""
    os.environ["OPENAI_API_KEY"] = settings["token"]
    common = {"model": settings["name"], "max_length": 512}
    before, began = _metrics(settings), time.monotonic()
    completions = _evaluate(
        "local-completions", TASKS, settings["limit"],
        {**common, "base_url": f"{settings['url']}/v1/completions", "tokenizer": "client", "add_bos_token": True},
    )  # fmt: skip
    chats = _evaluate(
        "local-chat-completions", TASKS[-1:], settings["limit"],
        {**common, "base_url": f"{settings['url']}/v1/chat/completions"}, apply_chat_template=True,
    )  # fmt: skip
    seconds, after = time.monotonic() - began, _metrics(settings)
    cost = {name: after[name] - before.get(name, 0.0) for name in after}
    return {"completions": completions, "chats": chats, "seconds": seconds, "cost": cost}


def plaintext(settings: dict[str, Any]) -> dict[str, Any]:
    """What the model itself answers and scores: greedy text, log-probabilities, vectors, and lm-eval's `hf` model."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"]).float().eval()
    ids = tokenizer(QUESTION, return_tensors="pt")["input_ids"]
    encoder = AutoModel.from_pretrained(settings["encoder"]).float().eval()
    with torch.no_grad():
        made = model.generate(ids, max_new_tokens=max(2, settings["tokens"]), do_sample=False)
        two = made[:, : ids.shape[1] + 2]
        logprobs = model(two).logits[0].log_softmax(-1)[:-1].gather(-1, two[0, 1:, None])[:, 0]
        vectors = []
        for sentence in SENTENCES:
            mean = encoder(**tokenizer(sentence, return_tensors="pt")).last_hidden_state[0].mean(0)
            vectors.append((mean / mean.norm()).tolist())
    kept = made[0, ids.shape[1] : ids.shape[1] + settings["tokens"]]
    arguments = {"pretrained": settings["model"], "device": "cpu", "dtype": "float32", "add_bos_token": True}
    return {
        "text": tokenizer.decode(kept), "logprobs": logprobs.tolist(), "whole": tokenizer.decode(two[0, 1:]),
        "vectors": vectors, "evaluation": _evaluate("hf", TASKS, settings["limit"], arguments),
    }  # fmt: skip


PROGRAMS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "openai": official_client, "page": page, "lm-eval": evaluation, "plaintext": plaintext,
}  # fmt: skip


def serve(name: str, settings: Path) -> None:
    """Run one of `PROGRAMS`, and write what it saw beside its settings."""
    seen = PROGRAMS[name](json.loads(settings.read_text()))
    settings.with_suffix(".seen").write_text(json.dumps(seen, default=float))


def _console(chrome: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chrome.get_log("browser")
    return found


def _evaluate(
    model: str, tasks: tuple[str, ...], limit: int, arguments: dict[str, Any], **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Scores by task and measure, and what the model answered to each question."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    made = simple_evaluate(
        model=model, model_args=arguments, tasks=list(tasks), limit=limit, bootstrap_iters=0, log_samples=True,
        task_manager=TaskManager(include_path=str(_TASK_FOLDER), include_defaults=False), **more,
    )  # fmt: skip
    scores = {
        task: {name.partition(",")[0]: value for name, value in row.items() if "," in name and "stderr" not in name}
        for task, row in made["results"].items()
    }
    answers = {
        task: [each["resps"] for each in sorted(rows, key=lambda row: row["doc_id"])]
        for task, rows in made["samples"].items()
    }
    return {"scores": scores, "answers": answers}


def _metrics(settings: dict[str, Any]) -> dict[str, float]:
    """The gateway's counters of bytes, rounds and tokens."""
    request = urllib.request.Request(
        f"{settings['url']}/metrics", headers={"Authorization": f"Bearer {settings['token']}"}
    )
    with urllib.request.urlopen(request, timeout=30) as found:
        lines = found.read().decode().splitlines()
    named = {"bytes": "private_llm_bytes_total", "rounds": "private_llm_rounds_total",
             "tokens": "private_llm_tokens_total"}  # fmt: skip
    return {
        name: sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{counter}{{"))
        for name, counter in named.items()
    }
