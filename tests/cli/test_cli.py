"""The command line: what it prints, its JSON, and how it fails."""

import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from private_llm_cli.app import main
from private_llm_cli.commands.models import demo_model
from transformers import OPTConfig, OPTForCausalLM

from private_llm.config import PrivateConfig

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'integrations'}", "HF_HUB_OFFLINE": "1"}
Run = Callable[..., str]
DEMO = demo_model()
DEAD = ("--hosts", "127.0.0.1:1,127.0.0.1:2,127.0.0.1:3", "--allow-plain-loopback")


def rows(run: Run, *arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run(*arguments, "--json").splitlines()]


def start(*arguments: str) -> subprocess.Popen[str]:
    """Run a command in a process of its own."""
    command = [sys.executable, "-c", "from private_llm_cli.app import main; main()", *arguments]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny OPT with a word tokenizer, on disk."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(3)
    config = OPTConfig(
        hidden_size=16, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=24,
        max_position_embeddings=32, word_embed_proj_dim=16, bos_token_id=2, eos_token_id=3, pad_token_id=1,
    )  # fmt: skip
    OPTForCausalLM(config).save_pretrained(folder)
    words = {word: number for number, word in enumerate(["<unk>", "<pad>", "<s>", "</s>", *"abcdefghijklmnopqrst"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>").save_pretrained(folder)
    return folder


def test_version(run: Run) -> None:
    from private_llm import __version__

    assert run("--version").strip() == __version__


def test_doctor_measures(run: Run) -> None:
    (report,) = rows(run, "doctor")
    assert report["torch"] == torch.__version__
    for speed in ("prg_gb_per_s", "ring_matmul_gmac_per_s", "loopback_latency_us"):
        assert isinstance(report[speed], float)
        assert report[speed] > 0
    assert "tiles" in report["ring_matmul_kernel"]
    assert isinstance(report["warnings"], list)


def test_doctor_names_arm_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux gives their features another field, and no name."""
    from private_llm_cli.commands import doctor

    monkeypatch.setattr(doctor, "cpu_field", lambda name: "fp asimd crc32" if name == "Features" else "")
    monkeypatch.setattr(doctor.binding, "get_host_cpu_name", lambda: "cortex-a72")
    for speed in ("prg_speed", "matmul_speed", "loopback_latency"):
        monkeypatch.setattr(doctor, speed, lambda: 1.0)
    report = doctor.examine()
    assert (report["cpu"], report["cpu_flags"]) == ("cortex-a72", ["asimd"])
    assert any("no AES instructions" in warning for warning in report["warnings"])
    assert doctor.machine().startswith("cortex-a72, ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("estimate", "llama-700b"), "(did you mean llama-7b, llama-8b?); want a model folder"),
        (("estimate", "opt-125m", "--seq", "0"), "got seq 0"),
        (("estimate", "bert-base", "--seq", "4", "--new", "2"), "does not generate"),
        (("estimate", "opt-125m", "--seq", "4000"), "the model has 2048"),
        (
            ("generate", "no-such-model", "--prompt", "x"),
            "no such folder here, and HF_HUB_OFFLINE",
        ),
        (("generate", "/no/such", "--prompt", "x"), "'/no/such': no such folder"),
        (("generate", "", "--prompt", "x"), "argument: got an empty text; want a value, or leave it"),
        (("chat", "--kv-cache="), "kv-cache: got an empty text"),
        (("gateway", "--wait", "nan"), "wait: got nan; want 0 seconds or more"),
        (("gateway", "--allow-host", "http://x/"), "allowed_hosts: got 'http://x/'; want a name or an address alone"),
        (("gateway", "--allow-host", "x:8000"), "allowed_hosts: got 'x:8000'"),
        (("gateway", "--token", "eight or more\n"), "token: want at least 8 ASCII characters without spaces"),
        (("generate", "/", "--prompt", "x"), "'/': the folder holds no config.json"),
        (("party", "--index", "0"), "hosts: got none"),
        (("party", "--index", "0", "--hosts", "a:1,b:2"), "hosts: got 2 addresses; want 3"),
        (("party", "--index", "0", "--hosts", "a:1,b:2,c:3", "--tls", "/nowhere"), "there is no folder /nowhere"),
        (("party", "--index", "3", "--hosts", "a:1,b:2,c:3", "--tls", "/nowhere"), "party: got 3; want 0 to 2"),
        (("party", "--index", "-1", "--hosts", "a:1,b:2,c:3", "--tls", "/nowhere"), "party: got -1; want 0 to 2"),
        (("generate", "any", "--prompt", "x", "--temperature", "1", "--top-p", "2"), "top-p: got 2; want a prob"),
        (("generate", "any", "--prompt", "x", "--temperature", "1", "--top-p", "nan"), "top-p: got nan"),
        (("generate", "any", "--prompt", "x", "--temperature", "-1"), "temperature: got -1"),
        (("generate", "any", "--prompt", "x", "--advance", "2"), "draft: --draft-paths and --advance need drafts"),
        (("generate", DEMO, "--prompt", "x", "--draft", "lookup", "--advance", "-1"), "FixedCounts: got advance=-1"),
        (("generate", DEMO, "--prompt", "x", "--draft", "lookup", "--draft-paths", "0"), "paths: got 0; want 1"),
        (("generate", "any", "--prompt", "x", "--draft", "lookup", "--preprocess"), "preprocess: with --draft"),
        (("generate", "any", "--prompt", "x", "--top-p", "0.5"), "greedy text has no use for it"),
        (("generate", "any", "--prompt", "x", "--tls", "/nowhere"), "--tls and --allow-plain-loopback protect nothing"),
        (("generate", "any", "--prompt", "x", "--kv-cache", "sliding-window,recent"), "got 'sliding-window,recent'"),
        (("generate", "any", "--prompt", "x", "--kv-cache", "newest"), "kv_cache: got 'newest'"),
        (("estimate", "opt-125m", "--kv-cache", "sliding-window,last=3"), "kv_cache: unknown key(s) last"),
        (("generate", "any", "--prompt", "x", "--adder", "fast"), "adder: got 'fast'; want auto, prefix, ripple, keys"),
        (("chat", "--adder", "keys,latency_ms=2"), "adder: got 'keys,latency_ms=2'"),
        (("gateway", "--adder", "auto,latency=2"), "adder: got 'latency=2'; want auto"),
        (("generate", "any", "--prompt", "x", "--adder", "auto,latency_ms=inf"), "adder: got 'latency_ms=inf'"),
        (("generate", "any", "--prompt", "x", "--adder", "keys", "--protocol", "quad"), "adder='keys' is a way of"),
        (("generate", "any", "--prompt", "x", "--hosts", ""), "hosts: got an empty text"),
        (("generate", "any", "--prompt", "x", "--hosts", "a:1,b:2,c:3", "--party-mode", "threads"), "leave it out"),
        (("party", "--index", "0", "--hosts", "a:1,b:2,c:3", "--sessions", "0"), "sessions: got 0"),
        (("share", "any", "--out", ""), "out: got an empty text"),
        (("certs", "--out", " "), "out: got an empty text"),
        (("certs", "--out", "never-written", "--days", "nan"), "days: got nan"),
        (("certs", "--out", "never-written", "--days", "-1"), "days: got -1"),
        (("certs", "--out", "never-written", "--parties", "0"), "parties: got 0"),
        (("audit", "\N{SUPERSCRIPT TWO},8,2"), "want alpha,c,m"),
        (("estimate", "opt-125m", "--gmacs", "1", "--latency", "nan"), "got 1000 Mbit/s and nan ms"),
        (("estimate", "opt-125m", "--gmacs", "1", "--image", "3x8x8"), "'opt-125m' reads text"),
        (("estimate", "opt-125m", "--protocol", "cascade", "--plans", "--image", "3x8x8"), "leave out --image"),
        (("estimate", "opt-125m", "--gmacs", "1", "--ranges", "/nope.json"), "ranges: /nope.json: No such file"),
        (("estimate", "opt-125m", "--protocol", "cascade", "--plans", "--ranges", "x"), "leave out --ranges"),
        (("calibrate", DEMO, "--text", "/nope.txt"), "text: /nope.txt: No such file or directory; want a file with"),
        (("calibrate", DEMO, "--out", "/nope/x.json"), "out: there is no folder /nope; want a file in one"),
        (("calibrate", "/nope"), "'/nope': no such folder"),
        (("diff", "--image", "x.png"), "Unrecognized configuration class OPTConfig for this kind of AutoModel"),
        (("predictors", "show", "folder", "--plot", "levels.txt"), "want a name that ends in .png"),
        (("predictors", "show", "folder", "--plot", "/nope/x.png"), "cannot write '/nope/x.png'"),
        (("share", "no-such-model", "--out", "never-written"), "no-such-model"),
        (("gateway", "--protocol", "assisted", "--sessions", "4"), "sessions: got 4 without hosts"),
        (("gateway", "--protocol", "assisted", "--reveal", "token"), "reveal: got 'token'; protocol='assisted' has no"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes_are_one_message(run: Run, arguments: tuple[str, ...], message: str) -> None:
    assert message in " ".join(run(*arguments, code=2).split())


def test_an_interrupt_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("private_llm_cli.commands.generate.run", interrupted)
    assert run("demo", code=130).rstrip().endswith("private-llm: stopped")


@pytest.mark.parametrize(
    ("words", "target"),
    [
        (("generate", DEMO, "--prompt", "a"), "commands.generate.generate"),
        (("chat", DEMO), "commands.terminal_chat.terminal_chat"),
        (("gateway", DEMO, "--port", "0"), "commands.gateway.gateway"),
    ],
)
def test_numbers_and_waits_reach_the_configuration(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], target: str
) -> None:
    found: list[PrivateConfig] = []
    keep = lambda *given: found.extend(each for each in given if isinstance(each, PrivateConfig))  # noqa: E731
    monkeypatch.setattr(f"private_llm_cli.{target}", keep)
    run(*words, "--frac-bits", "15", "--timeout", "7", "--busy-wait", "3")
    assert [(each.frac_bits, each.timeout_s, each.busy_wait_s) for each in found] == [(15, 7.0, 3.0)]


def test_a_folder_without_weights_says_what_it_may_be(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    for path in checkpoint.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    for arguments in (("generate", str(tmp_path), "--prompt", "a"), ("diff", str(tmp_path), "--prompt", "a")):
        assert "the parties are (--hosts)" in " ".join(run(*arguments, code=2).split())


@pytest.mark.parametrize("text", ["{nope", "[]", '{"model_type": "llama", "hidden_size": "x"}', '{"model_type": 3}'])
def test_a_configuration_that_is_none_is_one_message(run: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert f"configuration of '{tmp_path}'" in run("estimate", str(tmp_path), code=2).replace("\n", "")


def test_what_nobody_foresaw_is_one_message_with_a_way_to_its_traceback(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from private_llm_cli.commands import doctor

    def fails(*_: object) -> None:
        raise RuntimeError("the reason\nand more")

    monkeypatch.setattr(doctor, "examine", fails)
    told = run("doctor", code=1)
    assert told.splitlines() == [
        "measuring this machine ...",
        "private-llm: unforeseen RuntimeError: the reason; `private-llm --traceback ...` shows where it comes from",
    ]
    monkeypatch.setattr(sys, "argv", ["private-llm", "--traceback", "doctor"])
    with pytest.raises(RuntimeError, match="the reason"):
        main()


def test_a_file_that_cannot_be_written_is_named(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").symlink_to(tmp_path / "nowhere")
    told = run("share", str(checkpoint), "--out", str(tmp_path / "file"), code=2)
    assert told.splitlines()[1].startswith(f"private-llm: {tmp_path / 'file'}")


def test_long_work_is_not_silent_in_a_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from private_llm_cli.commands import output

    monkeypatch.setattr(output, "QUIET_SECONDS", 0.0)
    with output.progress_bar(2) as step:
        step("building", 0)
        step("counting")
    assert capsys.readouterr().err.splitlines() == ["building", "counting: 1 of 2"]
    with output.progress_bar() as step:
        step("calling the parties", 0)
        logging.getLogger("private_llm").warning("waiting for party 1", extra={"event": "waiting"})
        logging.getLogger("private_llm").info("something else")
    assert capsys.readouterr().err.splitlines() == ["calling the parties", "waiting for party 1"]
    with output.progress_bar(2, quiet=True) as step:
        step("counting")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(output, "QUIET_SECONDS", 0.2)
    with output.progress_bar() as step:
        time.sleep(0.5)
        step("a step of half a second", 0)
        time.sleep(0.5)
    told = capsys.readouterr().err.splitlines()
    for what in ("working", "a step of half a second"):
        assert any(re.fullmatch(rf"{what} \(\d s\)", line) for line in told)


def test_a_text_that_is_too_long_ends_before_parties_are_called(run: Run, checkpoint: Path) -> None:
    ask = ("generate", str(checkpoint), "--prompt", "a " * 40, "--max-new-tokens", "4", *DEAD)
    assert "take 43 positions; the model has 32" in run(*ask, code=2)


def test_generate(run: Run, checkpoint: Path) -> None:
    (made,) = rows(run, "generate", str(checkpoint), "--prompt", "a b c", "--max-new-tokens", "4")
    assert made["new_tokens"] == 4
    text = made["private_text"]
    assert text.startswith("a b c")
    assert sum(made["bytes_by_link"].values()) == made["bytes_total"]
    (by_keys,) = rows(run, "generate", str(checkpoint), "--prompt", "a b c", "--max-new-tokens", "4", "--adder", "keys")
    assert by_keys["private_text"] == text
    assert by_keys["rounds"] < made["rounds"] * 2 / 3


@pytest.mark.full
def test_generate_under_a_cache_policy(run: Run, checkpoint: Path) -> None:
    """The setting reaches parties in processes; a window costs less, in a run and in an estimate."""
    policy = ("--kv-cache", "sliding-window,recent=3,first=1")
    ask = ("generate", str(checkpoint), "--prompt", "a b c", "--max-new-tokens", "6")
    (whole,) = rows(run, *ask)
    (threads,) = rows(run, *ask, *policy)
    (processes,) = rows(run, *ask, *policy, "--party-mode", "processes")
    assert (threads["bytes_total"], threads["private_text"]) == (processes["bytes_total"], processes["private_text"])
    assert threads["bytes_total"] < whole["bytes_total"]
    size = ("estimate", str(checkpoint), "--seq", "3", "--new", "6")
    (full,), (window,) = rows(run, *size), rows(run, *size, *policy)
    assert window["bytes_total"] < full["bytes_total"]
    assert window["memory_per_party"]["cache"] * 8 == full["memory_per_party"]["cache"] * 4


@pytest.mark.parametrize("protocol", ["trio", "dealer"])
def test_generate_with_preprocessing_apart(run: Run, checkpoint: Path, protocol: str) -> None:
    ask = ["generate", str(checkpoint), "--prompt", "a b c", "--max-new-tokens", "3", "--protocol", protocol]
    (apart,), (merged,) = rows(run, *ask, "--preprocess"), rows(run, *ask)
    assert apart["private_text"] == merged["private_text"]
    assert isinstance(apart["seconds_preprocessing"], float)
    assert merged["seconds_preprocessing"] is None
    assert apart["bytes_preprocessing"] == merged["bytes_preprocessing"]
    helper = "the dealer" if protocol == "dealer" else "party 0"
    assert apart["bytes_by_link"][f"{helper} to party 2"] == apart["bytes_preprocessing"]


def test_diff_shows_small_errors(run: Run, checkpoint: Path) -> None:
    made = rows(run, "diff", str(checkpoint), "--prompt", "a b c", "--all")
    assert made[-1]["stopped"] is None
    names = {row["module"] for row in made[:-1]}
    assert {"model.decoder.layers.0.fc1", "model.decoder.layers.0", "lm_head"} <= names
    # Each module adds a few units of 2^-18 and the errors of its functions (below 1e-4); one layer, gains of one.
    for row in made[:-1]:
        assert isinstance(row["error_max"], float)
        assert row["error_max"] < 1e-3


def test_diff_compares_other_functions_with_themselves(run: Run, checkpoint: Path) -> None:
    """Softmax of MPCFormer is no softmax; what is shown is how far its private form is from its plain one."""
    ours = rows(run, "diff", str(checkpoint), "--prompt", "a b c", "--all")
    how = ("diff", str(checkpoint), "--prompt", "a b c", "--all", "--approximations", "mpcformer")
    theirs = rows(run, "--plugin", "rivals", *how)
    assert [row["module"] for row in theirs[:-1]] == [row["module"] for row in ours[:-1]]
    assert max(float(str(row["error_max"])) for row in theirs[:-1]) < 1e-3
    assert [row["largest"] for row in theirs[:-1]] != [row["largest"] for row in ours[:-1]]


def test_diff_says_what_a_ring_cannot_hold(run: Run, checkpoint: Path) -> None:
    *_, last = rows(run, "diff", str(checkpoint), "--prompt", "a b c", "--ring", "32")
    assert "32" in str(last["stopped"])


def test_share_overwrites_when_told_to(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    command = ("share", str(checkpoint), "--out", str(tmp_path / "shares"))
    (first,) = rows(run, *command)
    assert "--force" in run(*command, code=2)
    assert rows(run, *command, "--force") == [first]


@pytest.mark.full
def test_share_party_generate(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    """The three hosts' commands, on loopback with mutual TLS; all say that they are far apart."""
    (shared,) = rows(run, "share", str(checkpoint), "--out", str(tmp_path / "shares"))
    assert len(shared["files"]) == 3
    run("certs", "--out", str(tmp_path / "certs"))
    with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b, \
            socket.create_server(("127.0.0.1", 0)) as c:  # fmt: skip
        hosts = ",".join(f"127.0.0.1:{s.getsockname()[1]}" for s in (a, b, c))
    common = ("--hosts", hosts, "--tls", str(tmp_path / "certs"), "--adder", "keys")
    parties = [
        start("party", "--index", str(i), "--shares", str(path), "--sessions", "1", "--timeout", "60", *common)
        for i, path in enumerate(shared["files"])
    ]
    try:
        (made,) = rows(
            run, "generate", str(tmp_path / "shares" / "client"), "--prompt", "a b c", "--max-new-tokens", "3", *common
        )
        assert made["new_tokens"] == 3
        for process in parties:
            process.communicate(timeout=60)
            assert process.returncode == 0
    finally:
        for process in parties:
            process.kill()
    (local,) = rows(run, "generate", str(checkpoint), "--prompt", "a b c", "--max-new-tokens", "3")
    assert made["private_text"] == local["private_text"]
    assert made["rounds"] < local["rounds"] * 2 / 3


def test_demo_agrees_with_plaintext(run: Run) -> None:
    (made,) = rows(run, "demo", "--max-new-tokens", "3")
    assert made["tokens_equal"] == made["tokens"] == 3
    assert made["private_text"] == made["plain_text"]
    assert sum(layer["bytes"] for layer in made["layers"]) == made["bytes_total"]


@pytest.mark.full
def test_demo_prints_tables(run: Run) -> None:
    text = run("demo", "--tiny", "--prompt", "In the spring")
    for part in ("prompt", "private", "plaintext", "agreement", "party 0 to party 2", "lm_head", "protects nobody"):
        assert part in text


def test_a_hub_that_cannot_be_reached_is_asked_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers alone tries for more than a minute."""
    import huggingface_hub
    from private_llm_hf.checkpoint import checkpoint

    asked = []

    class Session:
        def head(self, url: str, headers: object, timeout: float) -> None:
            asked.append(url)
            raise OSError("Name or service not known")

    monkeypatch.setattr(checkpoint, "Checkpoint", None)  # it looks for adapters, at the hub too
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    for command in (("gateway", "shares/client", "--port", "0"), ("generate", "no-such-model", "--prompt", "x")):
        told = run(*command, code=2)
        assert "there is no such folder here, and" in told
        assert "cannot be reached to look for it (Name or service not known)" in told
    hub = huggingface_hub.constants.ENDPOINT
    assert asked == [f"{hub}/{name}/resolve/main/config.json" for name in ("shares/client", "no-such-model")]


def test_a_missing_extra_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from private_llm_cli import app
    from private_llm_cli.commands import doctor

    def fails(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'prometheus_client'", name="prometheus_client")

    wanted = ["torch>=2.6", 'prometheus-client>=0.20; extra == "hosting"', 'ruff; extra == "test"']
    monkeypatch.setattr(app.metadata, "requires", lambda _: wanted)
    monkeypatch.setattr(doctor, "examine", fails)
    assert run("doctor", code=2).strip() == (
        "measuring this machine ...\n"
        "private-llm: this command needs the Python package 'prometheus_client', which is not installed: pip install "
        "'private-llm[hosting]' (in a checkout: '.[hosting]')"
    )
