"""`private-llm chat`, and `generate` as it streams: turns on one cache, interruptions, and sessions that fail."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from private_llm_cli.app import main
from private_llm_cli.commands import terminal_chat as module
from private_llm_cli.commands.output import show_text
from private_llm_cli.commands.terminal_chat import TerminalChat
from private_llm_cli.commands.text import Conversation, TextStream
from private_llm_hf import PrivateConfig, patch
from private_llm_hf.client.model import PrivateModel
from private_llm_hf.models import smollm2
from private_llm_hf.wire.commands import CropCache
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from private_llm.errors import ConfigError, DomainError, PartyFailed, ProtocolAbort

CONFIG = PrivateConfig(protocol="plain", insecure=True, timeout_s=60)
WORDS = ["<unk>", "<end>", "user", "assistant", *"abcdefghijklmnopqrst"]
GREEDY = {"do_sample": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose tokens are words, with a chat template that ends an answer as it does not."""
    place = tmp_path_factory.mktemp("chat")
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=len(WORDS), max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(place)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<end>")
    fast.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant"
    fast.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture
def private(folder: Path) -> Iterator[Any]:
    with patch(LlamaForCausalLM.from_pretrained(folder).eval(), CONFIG) as model:
        yield model


class Flaky:
    """A model whose session fails after some tokens, once or more, and can be renewed."""

    def __init__(self, model: Any, after: int, times: int = 1, error: Exception | None = None) -> None:
        self._model, self._after, self._times = model, after, times
        self._error = error or PartyFailed("party 1 stopped: link closed")
        self.prompts: list[int] = []
        self.reconnected = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def reconnect(self) -> None:
        self.reconnected += 1

    def generate(self, ids: torch.Tensor, **given: Any) -> Any:
        self.prompts.append(ids.shape[1])

        def fail(row: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            if self._times and row.shape[1] == ids.shape[1] + self._after:
                self._times -= 1
                raise self._error
            return torch.zeros(len(row), dtype=torch.bool)

        given["stopping_criteria"] = [*given["stopping_criteria"], fail]
        return self._model.generate(ids, **given)


def asked(talk: Conversation, text: str, stopped: Callable[[], bool] = lambda: False) -> tuple[str, str]:
    talk.ask(text)
    stream = TextStream(talk.tokenizer, lambda _: None)
    return talk.answer(stream, stopped), stream.text


def wanted(folder: Path, tokenizer: Any, text: str, new_tokens: int) -> str:
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    made = plain.generate(ids, max_new_tokens=new_tokens, do_sample=False)
    return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


def test_turns_go_on_on_one_cache(folder: Path, tokenizer: Any, private: Any) -> None:
    talk = Conversation(private, tokenizer, 3, GREEDY)
    first = asked(talk, "a b")[1]
    assert first == wanted(folder, tokenizer, "user a b assistant", 3)
    sent: list[int] = []
    forward = private.parties.forward
    private.parties.forward = lambda call, secrets: sent.append(secrets[0][0].shape[-1]) or forward(call, secrets)
    held = talk.cached
    second = asked(talk, "c")[1]
    whole = f"user a b assistant {first} user c assistant"
    assert second == wanted(folder, tokenizer, whole, 3)
    assert held == 6
    assert sent == [len(whole.split()) - held, 1, 1], "only what the parties do not hold is sent"
    talk.reset()
    assert asked(talk, "a b")[1] == first


def test_a_cache_is_cut_back_to_what_both_have(folder: Path, tokenizer: Any, private: Any) -> None:
    talk = Conversation(private, tokenizer, 4, GREEDY)
    asked(talk, "a b")
    talk.messages[-1]["content"] = "t t t t"  # as a template that drops a part of an answer
    edits: list[Any] = []
    command = private.parties.command
    private.parties.command = lambda edit: edits.append(edit) or command(edit)
    got = asked(talk, "c")[1]
    assert any(isinstance(edit, CropCache) for edit in edits)
    assert got == wanted(folder, tokenizer, "user a b assistant t t t t user c assistant", 4)


@pytest.mark.parametrize("window", [None, 4])
def test_turns_under_assisted_go_on_on_the_cache_of_transformers(
    window: int | None, folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """A cache with a window cannot be cut back, so the text is read anew."""
    if window is not None:
        config = MistralConfig(**LlamaForCausalLM.from_pretrained(folder).config.to_dict(), sliding_window=window)
        MistralForCausalLM(config).save_pretrained(tmp_path)
        folder = tmp_path
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    read: list[int] = []
    with patch(plain, PrivateConfig(protocol="assisted", timeout_s=60)) as model:
        talk = Conversation(model, tokenizer, 3, GREEDY)
        first = asked(talk, "a b")[1]
        assert (first, talk.cached) == (wanted(folder, tokenizer, "user a b assistant", 3), 6)
        model.get_input_embeddings().register_forward_pre_hook(lambda _, given: read.append(given[0].shape[1]))
        text = f"user a b assistant {first} user c assistant"
        second = asked(talk, "c")[1]
        assert second == wanted(folder, tokenizer, text, 3)
        assert read == [len(text.split()) - 6, 1, 1]
        talk.messages[-1]["content"] = "t t"
        text = f"{text} t t user d assistant"
        assert asked(talk, "d")[1] == wanted(folder, tokenizer, text, 3)
        assert read[3:] == [len(text.split()) if window else 5, 1, 1]


def test_a_model_without_a_template_continues(folder: Path, private: Any) -> None:
    bare = PreTrainedTokenizerFast.from_pretrained(folder)
    bare.chat_template = None
    talk = Conversation(private, bare, 3, GREEDY)
    first = asked(talk, "a b c")[1]
    assert first == wanted(folder, bare, "a b c", 3)
    assert asked(talk, "d")[1] == wanted(folder, bare, f"a b c {first} d", 3)


def test_an_answer_is_stopped_and_the_session_goes_on(folder: Path, tokenizer: Any, private: Any) -> None:
    talk = Conversation(private, tokenizer, 8, GREEDY)
    talk.ask("a b")
    stream = TextStream(tokenizer, lambda _: None)
    assert talk.answer(stream, lambda: len(stream.ids) >= 1) == "stopped"
    first = stream.text
    assert first == wanted(folder, tokenizer, "user a b assistant", 2)
    assert talk.messages[-1] == {"role": "assistant", "content": first}
    whole = f"user a b assistant {first} user c assistant"
    assert asked(talk, "c") == ("length", wanted(folder, tokenizer, whole, 8))


def test_a_conversation_has_an_end(tokenizer: Any, private: Any) -> None:
    talk = Conversation(private, tokenizer, 50, GREEDY)
    finish, text = asked(talk, "a " * 57)
    assert (finish, len(text.split())) == ("length", 64 - 59 + 1), "up to the model's last position"
    with pytest.raises(DomainError, match=r"the conversation has .* tokens; the model has 64 positions"):
        asked(talk, "b")
    with pytest.raises(ConfigError, match="max-new-tokens: got 0"):
        Conversation(private, tokenizer, 0, GREEDY)


def chat(model: Any, tokenizer: Any, lines: str, monkeypatch: pytest.MonkeyPatch, new_tokens: int = 4) -> TerminalChat:
    """A chat with lines from a pipe."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    made = TerminalChat(Conversation(model, tokenizer, new_tokens, GREEDY), lambda: model, interactive=False)
    made.run()
    return made


def test_lines_from_a_pipe(
    folder: Path, tokenizer: Any, private: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat(private, tokenizer, "a b\n\n/cost\n/reset\n/help me\na b\n/quit\nnever\n", monkeypatch)
    found = capsys.readouterr()
    answer = wanted(folder, tokenizer, "user a b assistant", 4)
    assert found.out.splitlines() == [answer, answer]
    notes = found.err.splitlines()
    assert notes[0].startswith("4 tokens in ")
    assert notes[0].endswith("rounds; it was cut at its longest")
    assert "over all links" in notes[0]
    assert notes[1].startswith("1 answers: 4 tokens in ")
    assert notes[1].endswith("; 7 positions are cached")
    assert notes[2] == "a new conversation"
    assert notes[3].startswith("/help: no such command; /reset")
    assert len(notes) == 5


def test_bytes_that_are_no_text_are_not_asked(
    folder: Path, tokenizer: Any, private: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = chat(private, tokenizer, "", monkeypatch)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\na b\n"), encoding="utf-8"))
    talk.run()
    captured = capsys.readouterr()
    assert captured.out == f"{wanted(folder, tokenizer, 'user a b assistant', 4)}\n"
    assert captured.err.startswith("this line is not UTF-8, so it was not asked\n")
    assert command(monkeypatch, "generate", str(folder), "--prompt", "a \udcff", "--protocol", "plain") == 2
    assert "got bytes that are not UTF-8" in capsys.readouterr().err


def test_an_answer_goes_on_after_a_failure(
    folder: Path, tokenizer: Any, private: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Flaky(private, after=3)
    chat(model, tokenizer, "a b\nc\n", monkeypatch)
    first = wanted(folder, tokenizer, "user a b assistant", 4)
    second = wanted(folder, tokenizer, f"user a b assistant {first} user c assistant", 4)
    found = capsys.readouterr()
    had = " ".join(first.split()[:2])
    assert found.out.splitlines() == [had, first, second], "what it had, all of it, and the next answer"
    assert found.err.splitlines()[0] == "party 1 stopped: link closed"
    assert model.reconnected == 1
    assert model.prompts[:2] == [4, 6], "it goes on where it was"


def test_what_may_not_be_trusted_is_asked_anew(
    folder: Path, tokenizer: Any, private: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Flaky(private, after=3, error=ProtocolAbort("party 2 lied"))
    chat(model, tokenizer, "a b\n", monkeypatch)
    assert model.prompts == [4, 4]
    assert capsys.readouterr().out.splitlines()[-1] == wanted(folder, tokenizer, "user a b assistant", 4)


def test_a_session_that_cannot_be_renewed_ends_a_pipe(
    tokenizer: Any, private: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Flaky(private, after=3)
    monkeypatch.setattr(model, "reconnect", lambda: (_ for _ in ()).throw(PartyFailed("party 1 is not there")))
    with pytest.raises(PartyFailed, match="link closed"):
        chat(model, tokenizer, "a b\nc\n", monkeypatch)
    found = capsys.readouterr()
    assert len(found.out.split()) == 2
    assert found.err.splitlines() == ["party 1 stopped: link closed", "party 1 is not there"]


def test_somebody_at_a_terminal_is_asked(
    tokenizer: Any, private: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Flaky(private, after=2, times=2)
    replies = iter(["a b", "n", KeyboardInterrupt, "c", "y"])
    questions: list[str] = []

    def reply(question: str) -> str:
        questions.append(question)
        answer = next(replies, EOFError)
        if isinstance(answer, str):
            return answer
        raise answer

    monkeypatch.setattr("builtins.input", reply)
    talk = Conversation(model, tokenizer, 4, GREEDY)
    made = TerminalChat(talk, lambda: model, interactive=True)
    made.welcome("tiny", CONFIG)
    made.run()
    again = "Reconnect, and go on with the answer? [Y/n] "
    assert questions == ["> ", again, "> ", "> ", again, "> "]
    assert [len(turn["content"].split()) for turn in talk.messages] == [2, 1, 1, 4], "an answer of one word was kept"
    assert model.reconnected == 1
    said = capsys.readouterr().err
    assert "tiny under protocol plain" in said
    assert "protects nobody" in said
    assert "/quit or Ctrl-D ends" in said


def test_ctrl_c_stops_one_answer(
    tokenizer: Any, private: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(TextStream):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.ids) == 2:
                signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patched:
        patched.setattr(module, "TextStream", Interrupted)
        chat(private, tokenizer, "a b\n", monkeypatch, new_tokens=8)
    assert signal.getsignal(signal.SIGINT) is before
    found = capsys.readouterr()
    assert len(found.out.split()) == 3, "the token that was computed meanwhile is kept"
    assert found.err.splitlines()[0].endswith("rounds; stopped")
    with module._interruptible() as stopped:
        signal.raise_signal(signal.SIGINT)
        assert stopped()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def command(monkeypatch: pytest.MonkeyPatch, *words: str, lines: str = "") -> int:
    monkeypatch.setattr(sys, "argv", ["private-llm", *words])
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_command_takes_smollm2_or_the_bundled_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("chat", "--protocol", "plain", "--party-mode", "threads", "--max-new-tokens", "2")
    monkeypatch.setattr(smollm2, "missing", lambda: None)
    monkeypatch.setattr(smollm2, "folder", lambda cache=None: folder)
    assert command(monkeypatch, *options, lines="a b\n") == 0
    words = capsys.readouterr().out.split()
    assert len(words) == 2
    assert set(words) <= set(WORDS)
    monkeypatch.setattr(smollm2, "missing", lambda: "not installed")
    assert command(monkeypatch, *options, lines="My fellow\n") == 0
    assert capsys.readouterr().out.strip()
    assert command(monkeypatch, "chat", "--hosts", "a:1,b:2,c:3", "--allow-plain-loopback") == 2
    assert "model: got none with --hosts" in capsys.readouterr().err


def fails_after_two_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every private model's session, from now on."""
    made = TextStream.put

    def put(self: TextStream, value: torch.Tensor) -> None:
        made(self, value)
        if len(self.arrived) == 3:
            raise PartyFailed("party 1 stopped: link closed")

    monkeypatch.setattr(TextStream, "put", put)


def test_generate_keeps_what_it_had(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("generate", str(folder), "--prompt", "a b c", "--max-new-tokens", "5", "--protocol", "plain")
    assert command(monkeypatch, *options) == 0
    whole = capsys.readouterr().out.splitlines()[0].split()
    assert whole[:3] == ["a", "b", "c"]
    assert len(whole) == 8
    assert command(monkeypatch, *options, "--json") == 0
    assert json.loads(capsys.readouterr().out)["private_text"].split() == whole
    fails_after_two_tokens(monkeypatch)
    assert command(monkeypatch, *options) == 2
    found = capsys.readouterr()
    assert found.out.split() == whole[:5]
    assert found.err.splitlines()[-1] == "private-llm: party 1 stopped: link closed"
    assert command(monkeypatch, *options, "--json") == 2
    made = json.loads(capsys.readouterr().out)
    assert made["private_text"].split() == whole[:5]
    assert made["error"] == "party 1 stopped: link closed"


def test_text_comes_piece_by_piece(tokenizer: Any) -> None:
    pieces: list[str] = []

    class Bytes:
        @staticmethod
        def decode(ids: list[int], **_: object) -> str:
            return bytes(ids).decode(errors="replace")

    stream = TextStream(Bytes(), pieces.append)
    stream.put(torch.tensor([[65, 66]]))
    for byte in "cé!".encode():
        stream.put(torch.tensor([byte]))
    assert pieces == ["c", "é", "!"], "not the prompt, and no half character"
    stream.put(torch.tensor([0xC3]))
    stream.end()
    stream.end()
    assert pieces == ["c", "é", "!", "\ufffd"]
    stream.go_on()
    stream.put(torch.tensor([[1, 2, 3]]))
    assert len(stream.ids) == 5, "a further prompt is no text"
    with_prompt = TextStream(tokenizer, pieces.append, prompt=True)
    told = len(pieces)
    with_prompt.put(torch.tensor([[4, 5]]))
    assert len(pieces) == told, "what is said meanwhile would stand in the prompt's line"
    with_prompt.put(torch.tensor([4]))
    assert pieces[told:] == ["a b a"]
    failed = TextStream(tokenizer, pieces.append, prompt=True)
    failed.put(torch.tensor([[4, 5]]))
    failed.end()
    assert pieces[-1] == "a b"


def test_a_terminal_gets_no_escape_sequences(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from private_llm_cli.commands import output

    show_text("a\x1b]0;title\x07[bold]\tb\n")
    assert capsys.readouterr().out == "a\x1b]0;title\x07[bold]\tb\n"
    screen = io.StringIO()
    monkeypatch.setattr(output, "CONSOLE", Console(file=screen, force_terminal=True, color_system=None))
    show_text("a\x1b]0;title\x07[bold]\u202eb\n")
    assert screen.getvalue() == "a\ufffd]0;title\ufffd[bold]\ufffdb\n"


def test_a_model_that_cannot_reconnect_is_loaded_anew(private: PrivateModel) -> None:
    class Old:
        closed = False

        def close(self) -> None:
            self.closed = True

    old, new = Old(), object()
    assert module._reconnected(old, lambda: new) is new
    assert old.closed
