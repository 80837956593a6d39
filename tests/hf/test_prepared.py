"""Protocol "assisted" with corrections that were prepared: one server is online."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread, current_thread

import pytest
import torch
import transformers
from private_llm_hf import AutoPrivateModelForCausalLM, PrivateConfig, patch, prepare_corrections
from private_llm_hf.client import corrections
from private_llm_hf.party import product_server
from private_llm_hf.party.product_server import ProductServer
from private_llm_hf.tools.estimate import estimate
from private_llm_hf.wire.assisted import HEADER, BeginBlock, MaskKey
from torch import Tensor
from transformers import PreTrainedModel

from private_llm.assisted.corrections import CorrectionFolder
from private_llm.assisted.fixed_point import BYTES
from private_llm.assisted.projection import Projection
from private_llm.errors import (
    ConfigError,
    CorrectionsUsedUp,
    PartyFailed,
    ProtocolAbort,
    ShareFileError,
    TransportError,
)
from private_llm.kernels import ops
from tests.hf import tiny
from tests.hf.compare import BATCH, GREEDY, worst
from tests.hf.test_assisted import ASSISTED, ERROR
from tests.hf.test_remote import free_ports, running

ROWS = BATCH["input_ids"].numel()


def stored(folder: Path, **more: object) -> PrivateConfig:
    return replace(ASSISTED, corrections=str(folder / "corrections"), **more)


@contextmanager
def prepared(kind: str, folder: Path, tokens: int, **more: object) -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    """A tiny model of a family, and its assisted self with one server."""
    plain, config = tiny.build(kind), stored(folder, **more)
    prepare_corrections(plain, config, tokens)
    with patch(plain, config) as private:
        yield plain, private


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "t5"])
def test_models_compute_what_their_plaintext_does(kind: str, tmp_path: Path) -> None:
    with prepared(kind, tmp_path, 150) as (plain, private), torch.no_grad():
        more = {"decoder_input_ids": BATCH["input_ids"]} if kind == "t5" else {}
        got, want = private(**BATCH, **more), plain(**BATCH, **more)
        for name in want.keys() & {"logits", "last_hidden_state"}:
            assert worst(got[name], want[name], BATCH["attention_mask"]) < ERROR
        if kind in ("llama", "gpt2"):
            assert torch.equal(private.generate(**BATCH, **GREEDY), plain.generate(**BATCH, **GREEDY))
            beams = {"max_new_tokens": 4, "num_beams": 3, "do_sample": False}
            assert torch.equal(private.generate(**BATCH, **beams), plain.generate(**BATCH, **beams))


def test_prompts_longer_than_a_block_and_a_parallel_refill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corrections, "_BLOCK_ROWS", 3)
    with prepared("llama", tmp_path, 50) as (plain, private), torch.no_grad():
        assert private.parties.tokens_left == 50
        ids = torch.arange(40)[None] + 3
        assert worst(private(ids).logits, plain(ids).logits) < 2 * ERROR
        assert private.parties.tokens_left == 10
        with pytest.raises(CorrectionsUsedUp, match=r"wants 40 rows; this session used 40, and 10 are left"):
            private(ids)
        assert prepare_corrections(plain, stored(tmp_path), 30) >= 30  # as `private-llm prepare` does beside it
        assert worst(private(ids).logits, plain(ids).logits) < 2 * ERROR


def test_the_server_gets_rows_under_fresh_masks_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []
    original = ProductServer.product

    def spy(self: ProductServer, x: Tensor, weight: object, rows: int) -> Tensor:
        assert self._seed is None
        seen.append(ops.unpacked(x, (rows, -1), 5))
        return original(self, x, weight, rows)

    plain, config = tiny.build("llama"), stored(tmp_path)
    prepare_corrections(plain, config, 130)
    monkeypatch.setattr(ProductServer, "product", spy)
    with patch(plain, config) as private, torch.no_grad():
        private.cost(reset=True)
        for _ in range(3):
            private(input_ids=torch.ones(1, 40, dtype=torch.int64))  # the same rows again and again
        costs, hidden, inner = private.cost(), plain.config.hidden_size, plain.config.intermediate_size
    values = torch.cat([each.view(-1) for each in seen])
    assert len(values.unique()) > 0.999 * len(values)
    counts = torch.bincount((values >> 32) & 0xFF, minlength=256).double()
    assert float(((counts - len(values) / 256) ** 2 / (len(values) / 256)).sum()) < 400  # chi-square, 255 degrees
    up = 2 * (3 * hidden + inner) + hidden
    down = 2 * (hidden + 2 * 32 + hidden + 2 * inner + hidden) + plain.config.vocab_size
    commands = costs.bytes_total - 3 * (40 * BYTES[16] * (up + down) + 9 * HEADER.size)
    assert 0 <= commands < 10


def test_an_estimate_knows_one_server(tmp_path: Path) -> None:
    with prepared("llama", tmp_path, 10) as (plain, private), torch.no_grad():
        kept = sum(each.stat().st_size for each in (tmp_path / "corrections").iterdir())
        private.cost(reset=True)
        private(torch.arange(4)[None] + 3)
        made = estimate(type(plain), plain.config, stored(tmp_path), sequence=4, new_tokens=0)
        assert made.corrections is not None
        assert made.corrections.rows == 4
        assert 0 < kept - made.corrections.bytes * 10 // 4 < 4000  # what a block says of itself
        found, run = made.costs, private.cost()
        assert found.cost.sent.keys() == run.cost.sent.keys()
        assert 0 <= run.bytes_total - found.bytes_total < 10  # the start of a block


def _lying(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ProductServer.product

    def lie(self: ProductServer, x: Tensor, weight: object, rows: int) -> Tensor:
        made = original(self, x, weight, rows)
        made.view(rows, -1)[:, -1] ^= 1 << 7  # plus 2^39
        return made

    monkeypatch.setattr(ProductServer, "product", lie)


def test_a_lying_preparer_is_named_and_nothing_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _lying(monkeypatch)
    with pytest.raises(ProtocolAbort, match=r"^party 0 gave a wrong product of masks for 'model.*nothing"):
        prepare_corrections(tiny.build("llama"), stored(tmp_path), 5)
    assert list((tmp_path / "corrections").iterdir()) == []


def test_a_wrong_correction_names_the_preparation_and_a_wrong_answer_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, config = tiny.build("llama"), stored(tmp_path)
    with monkeypatch.context() as patched:
        _lying(patched)
        patched.setattr(Projection, "holds_modulo", lambda *_: True)
        prepare_corrections(plain, config, 5)
    with patch(plain, config) as private:
        with pytest.raises(ProtocolAbort, match=r"^the preparation by this machine gave .*delete the corrections"):
            private(torch.tensor([[3, 4]]))
        with pytest.raises(PartyFailed, match="over"):
            private(torch.tensor([[3, 4]]))
    shutil.rmtree(config.corrections or "")
    prepare_corrections(plain, config, 5)
    with patch(plain, config) as private:
        _lying(monkeypatch)
        with pytest.raises(ProtocolAbort, match=r"^party 0 gave a wrong product for .*ask other servers"):
            private(torch.tensor([[3, 4]]))


@pytest.mark.parametrize("restarted", [False, True])
def test_a_restored_folder_is_refused(restarted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a server that goes on, and by one that was started again and has a folder for what it heard."""
    plain = tiny.build("llama")
    config = stored(tmp_path, offline_folder=str(tmp_path / "server") if restarted else None)
    prepare_corrections(plain, config, 5)
    folder, copy = Path(config.corrections or ""), tmp_path / "copy"
    shutil.copytree(folder, copy)
    with patch(plain, config) as private:
        private(torch.tensor([[3, 4]]))
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    if restarted:
        monkeypatch.setattr(product_server, "_known_blocks", set())
    seen: list[int] = []
    monkeypatch.setattr(ProductServer, "product", lambda *_: seen.append(1))
    with patch(plain, config) as private, pytest.raises(ProtocolAbort, match="restored from a copy"):
        private(torch.tensor([[3, 4]]))
    assert not seen


def test_a_server_that_heard_of_too_many_blocks_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_server, "_MOST_BLOCKS", 0)
    with (
        prepared("opt", tmp_path, 3) as (_, private),
        pytest.raises(TransportError, match=r"party 0: .*too many blocks"),
    ):
        private(torch.tensor([[3, 4]]))


@pytest.mark.parametrize("first", ["rows", "key"])
def test_no_session_gives_keys_and_rows_to_one_server(first: str, tmp_path: Path) -> None:
    with prepared("opt", tmp_path, 3) as (_, private):
        if first == "rows":
            private(torch.tensor([[3, 4]]))
            with pytest.raises(ProtocolAbort, match="saw masked rows"):
                next(private.parties.mask_products(1, private.parties._checks))
        else:
            next(private.parties.mask_products(1, private.parties._checks))
            with pytest.raises(ProtocolAbort, match="must not see masked rows"):
                private(torch.tensor([[3, 4]]))


def test_a_server_with_a_key_refuses_rows(tmp_path: Path) -> None:
    with prepared("opt", tmp_path, 3) as (_, private):
        private.parties._give_key(private.parties._checks)
        private.parties._masks = None
        with pytest.raises(TransportError, match="with the key of masks takes a label"):
            private(torch.tensor([[3, 4]]))


@pytest.mark.parametrize("block", ["", "../" * 10 + "ab", "A" * 32])
def test_names_of_blocks_are_checked(block: str, tmp_path: Path) -> None:
    with prepared("opt", tmp_path, 3) as (_, private):
        private.parties.tell(BeginBlock(block))
        with pytest.raises(TransportError, match="32 digits"):
            private(torch.tensor([[3, 4]]))


def test_another_checkpoint_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    plain, config = tiny.build("llama"), stored(tmp_path)
    prepare_corrections(plain, config, 5)
    with torch.no_grad():
        plain.model.layers[1].mlp.down_proj.weight[0, 0] += 1
    for use in (lambda: patch(plain, config), lambda: prepare_corrections(plain, config, 5)):
        with pytest.raises(ShareFileError, match=r"another checkpoint: weight 'model.layers.1.mlp.down_proj' differs"):
            use()


def test_hosts_prepare_and_another_one_is_online(checkpoint: Path, tmp_path: Path) -> None:
    plain = tiny.build("llama")
    preparer, online = (
        stored(tmp_path, party_mode="remote", hosts=free_ports(1), allow_plain_loopback=True) for _ in range(2)
    )
    servers = [replace(each, corrections=None) for each in (preparer, online)]  # they are not told which they are
    with running(servers[0], [None], sessions=2), running(servers[1], [None], sessions=1):
        assert prepare_corrections(str(checkpoint), preparer, 40) == 40
        with pytest.raises(ConfigError, match="made corrections in"):
            AutoPrivateModelForCausalLM.from_pretrained(str(checkpoint), preparer)
        with AutoPrivateModelForCausalLM.from_pretrained(str(checkpoint), online) as private:
            assert torch.equal(private.generate(**BATCH, **GREEDY), plain.generate(**BATCH, **GREEDY))


@pytest.mark.full
def test_processes_compute_the_same(tmp_path: Path) -> None:
    with prepared("llama", tmp_path, 40, party_mode="processes") as (plain, private):
        assert torch.equal(private.generate(**BATCH, **GREEDY), plain.generate(**BATCH, **GREEDY))


def test_two_sessions_use_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corrections, "_BLOCK_ROWS", 5)
    with (
        prepared("opt", tmp_path, 40) as (plain, one),
        patch(plain, stored(tmp_path)) as two,
        torch.no_grad(),
    ):
        for _ in range(3):
            for private, ids in ((one, torch.tensor([[3, 4, 5]])), (two, torch.tensor([[9, 8]]))):
                assert worst(private(ids).logits, plain(ids).logits) < ERROR
        assert one.parties.tokens_left == 40 - 10 - 10 + 1


def test_refills_keep_a_number_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, plain = stored(tmp_path), tiny.build("opt")
    folder, looks = CorrectionFolder(config.corrections or ""), []
    told: list[str] = []
    asleep, here = time.sleep, current_thread()

    def sleep(seconds: float) -> None:
        if current_thread() is not here:  # other threads of the library sleep, too
            asleep(seconds)
            return
        looks.append(folder.rows())
        if len(looks) == 4:
            raise KeyboardInterrupt
        if len(looks) == 2:
            folder.claim(lambda _: None)

    monkeypatch.setattr(corrections.time, "sleep", sleep)
    monkeypatch.setattr(corrections, "_BLOCK_ROWS", 4)
    monkeypatch.setattr(corrections, "_TOUCH_S", 1e9)
    with pytest.raises(KeyboardInterrupt):
        prepare_corrections(plain, config, keep=10, notice=told.append)
    assert looks[0] == looks[1] >= 10
    assert looks[2] >= 10
    assert re.search(r"a token; 10 tokens, .*B in all, in .*, and more whenever fewer than 10 are left", told[0])
    assert told[1].startswith("in blocks of up to 4 tokens; what a session leaves of the block that it used last")
    assert told[2] == f"made 10 tokens; 10 are left in {folder.path}"
    assert told[3].startswith("made 4 tokens; 1")


def test_layers_that_run_several_times_a_token_take_as_many_rows(tmp_path: Path) -> None:
    config = transformers.AlbertConfig(
        embedding_size=16, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=48,
        vocab_size=64, max_position_embeddings=64,
    )  # fmt: skip
    plain, told = transformers.AlbertForMaskedLM(config).eval(), []
    assert prepare_corrections(plain, stored(tmp_path), 10, progress=lambda *each: told.append(each[1:])) == 10
    assert told[-1] == (10, 10)
    with patch(plain, stored(tmp_path)) as private, torch.no_grad():
        for left in (5, 0):
            ids = torch.arange(5)[None] + 3 + left
            assert worst(private(ids).logits, plain(ids).logits) < ERROR
            assert private.parties.tokens_left == left
        with pytest.raises(CorrectionsUsedUp):
            private(ids)


@pytest.mark.parametrize("party_mode", ["threads", pytest.param("processes", marks=pytest.mark.full)])
def test_a_thread_refills_beside_a_model_that_runs(
    party_mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corrections, "_BLOCK_ROWS", 8)
    monkeypatch.setattr(corrections, "_LOOK_S", 0.01)
    ended = Event()
    more = {"keep": 30, "stop": ended.is_set}
    with prepared("llama", tmp_path, 30, party_mode=party_mode) as (plain, private):
        refill = Thread(target=prepare_corrections, args=(plain, stored(tmp_path, party_mode=party_mode)), kwargs=more)
        refill.start()
        for _ in range(4):
            until = time.monotonic() + 60
            while private.parties.tokens_left < ROWS + 10 and time.monotonic() < until:
                time.sleep(0.01)
            assert torch.equal(private.generate(**BATCH, **GREEDY), plain.generate(**BATCH, **GREEDY))
        ended.set()
        refill.join(60)
        assert not refill.is_alive()


@pytest.mark.parametrize(
    ("use", "kind", "want"),
    [
        (lambda config: prepare_corrections(tiny.build("opt"), ASSISTED, 5), ConfigError, "corrections='FOLDER'"),
        (lambda config: prepare_corrections(tiny.build("opt"), config), ConfigError, "want one of them above 0"),
        (lambda config: prepare_corrections(tiny.build("opt"), config, 1 << 60), ConfigError, "they take .* free"),
        (lambda config: patch(tiny.build("opt"), config), CorrectionsUsedUp, "holds none; make some with"),
        (lambda config: replace(config, protocol="trio"), ConfigError, "they are for 'assisted'"),
        (lambda config: replace(config, hosts=("a:1", "b:1"), party_mode="remote"), ConfigError, "2 addresses; want 1"),
        (
            lambda config: patch(tiny.build("opt"), replace(config, corrections=None, hosts=("a:1",))), ConfigError,
            "got one server; want two",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(
    use: Callable[[PrivateConfig], object], kind: type[Exception], want: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=want):
        use(stored(tmp_path))


def test_keys_of_masks_may_be_replaced(tmp_path: Path) -> None:
    """A preparation has one for each block."""
    assert MaskKey() == MaskKey()
    plain, config = tiny.build("opt"), stored(tmp_path)
    prepare_corrections(plain, config, 200)
    folder, keys = CorrectionFolder(config.corrections or ""), set()
    while (found := folder.claim(lambda _: None)) is not None:
        keys.add(found[0].key.raw())
    assert len(keys) == 4
