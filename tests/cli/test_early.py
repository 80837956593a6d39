"""What the command line tells before it imports PyTorch: mistakes, what it loads, and whom it waits for."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from private_llm_cli.commands.models import want_hub
from private_llm_hf.models import smollm2

from private_llm.errors import ConfigError
from tests.cli.test_cli import DEMO, ENVIRONMENT, Run


def test_mistakes_are_told_before_pytorch_is_imported(tmp_path: Path) -> None:
    """That takes 10 s and more on a busy machine."""
    (tmp_path / "shares").write_text("none")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        here = f"127.0.0.1:{taken.getsockname()[1]}"
        party = f"party --index 0 --hosts {here},127.0.0.1:1,127.0.0.1:2"
        servers = "x party --index 0 --protocol assisted --hosts 127.0.0.1:3,127.0.0.1:4 --allow-plain-loopback"
        code = "import sys; from private_llm_cli.app import main\n"
        code += "for line in sys.stdin:\n try: sys.argv = line.split(); main()\n except SystemExit: pass\n"
        code += "print(sorted({'torch', 'transformers', 'numba'} & set(sys.modules)))"
        mistakes = {
            f"x {party}": "connections between endpoints need certificates",
            f"x {party} --allow-plain-loopback": f"cannot listen at {here}",
            f"x generate {DEMO} --prompt x --hosts {here},a:1,b:2": "connections between endpoints need certificates",
            f"x gateway --port {here[10:]}": f"port: cannot listen at {here}",
            "x gateway --draft lokup": "got 'lokup', and there is no such folder; did you mean 'lookup'?",
            "x gateway --draft autom": "did you mean 'auto'?",
            f"x chat {DEMO} --draft ./x": "draft of './x': no such folder",
            "x gateway --groups x": "groups: there is no file x; want a text file",
            "x gateway --public-prefix x": "public prefix: there is no file x; want a text file",
            f"x gateway --groups {__file__}": "groups: got a file without --hosts",
            f"x chat {DEMO} --draft opt": "draft of 'opt': there is no such folder here, and HF_HUB_OFFLINE",
            f"x chat {DEMO} --sparsity {tmp_path}": f"sparsity: {tmp_path}: no predictors.json",
            f"{servers} --shares {tmp_path / 'none'}": "none, and protocol 'assisted' has public weights",
            f"{servers} --model nosuch": "model of 'nosuch': there is no such folder here, and HF_HUB_OFFLINE",
            f"x share {DEMO} --out {__file__}": f"out: got '{__file__}', and {__file__} is a file; want a folder",
            f"x share {DEMO} --out {__file__}/x": f"out: got '{__file__}/x', and {__file__} is a file; want a folder",
            f"x generate {DEMO} --prompt x --gguf-file a.gguf": "got 'a.gguf', which is not in",
        }
        for path, why in {tmp_path / "none": "no such file", tmp_path / "shares": "it is no share file"}.items():
            words = party.replace(here, "127.0.0.1:3")
            mistakes[f"x {words} --allow-plain-loopback --shares {path}"] = f"{path}: {why}; want what"
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        out, err = process.communicate("\n".join(mistakes), timeout=60)
    assert out == "[]\n"
    assert [told for told in mistakes.values() if told not in err] == []


@pytest.mark.parametrize(("status", "code", "told"), [
    (401, "RepoNotFound", "holds no model of this name that you may read"), (404, "EntryNotFound", None),
    (401, None, "holds no model of this name"), (404, None, None), (500, None, None), (200, None, None),
])  # fmt: skip
def test_names_that_the_hub_does_not_know(
    status: int, code: str | None, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others, such as mirrors that do not say so, and files of other forms, are left to transformers."""

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            assert self.path == "/nosuch/resolve/main/config.json"
            self.send_response(status)
            if code is not None:
                self.send_header("X-Error-Code", code)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
        with pytest.raises(ConfigError, match=f"model of 'nosuch': .*{told}") if told else contextlib.nullcontext():
            want_hub("model", "nosuch")
        hub.shutdown()


def test_commands_say_what_they_begin_before_they_import_what_takes_long(tmp_path: Path) -> None:
    code = "import sys; from private_llm_cli.app import main\nsys.modules.update(torch=None, transformers=None)\n"
    code += "for line in sys.stdin:\n try: sys.argv = line.split(); main()\n except SystemExit: pass\n"
    told = {
        "x doctor": "measuring this machine ...", f"x calibrate {DEMO}": f"loading {DEMO} ...",
        "x demo --model bundled": "loading the demo model ...",
        "x demo --model smollm2": f"loading {smollm2.NAME} ...",
        "x diff": "loading the demo model ...", "x estimate gpt2": "estimating gpt2 ...",
        "x predictors train": "loading the demo model ...", f"x predictors show {tmp_path}": f"reading {tmp_path} ...",
    }  # fmt: skip
    dead = f"x gateway --port 0 --hosts 127.0.0.1:1,127.0.0.1:2,127.0.0.1:3 --allow-plain-loopback --groups {__file__}"
    words = "\n".join([*told, *(f"{each} --json" for each in told), dead])
    made = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, input=words, capture_output=True, text=True, timeout=60
    )
    *lines, loading, answers, last = made.stderr.splitlines()
    assert [line for line in lines if not line.startswith("private-llm: ")] == [*told.values()]
    assert len(lines) == 3 * len(told), "each command wanted PyTorch then"
    assert (loading, last.startswith("private-llm: ")) == ("loading the demo model ...", True)
    assert "127.0.0.1:1 (Connection refused); other --groups are tried: check" in answers


def test_the_first_line_says_what_is_loaded_and_who_does_not_answer(run: Run) -> None:
    hosts = "127.0.0.1:1,127.0.0.1:2"
    words = ("generate", DEMO, "--prompt", "x", "--protocol", "assisted", "--hosts", hosts, "--allow-plain-loopback")
    loading, answers, *_ = run(*words, "--timeout", "0.1", code=2).splitlines()
    assert loading == f"loading {DEMO} ..."
    assert answers.startswith("party 0 does not answer at 127.0.0.1:1 (Connection refused); this command will wait")
