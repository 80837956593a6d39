"""Protocol "assisted": transformers' models at the client, products of masked rows at two servers."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from private_llm_hf import AutoPrivateModel, AutoPrivateModelForCausalLM, PrivateConfig, patch
from private_llm_hf.checkpoint.weights import Sink, WeightList
from private_llm_hf.client import product_servers
from private_llm_hf.client.assisted_model import open_assisted
from private_llm_hf.client.launch import start_parties
from private_llm_hf.party.product_server import ProductServer
from private_llm_hf.wire.assisted import HEADER, REQUEST, LoadLines, UseLines
from torch import Tensor, nn
from transformers import PreTrainedModel

from private_llm.assisted.fixed_point import BYTES, IntegerWeight
from private_llm.assisted.masks import fresh_label
from private_llm.errors import (
    ConfigError,
    DomainError,
    PartyFailed,
    PatchMismatch,
    PlaintextLeak,
    ProtocolAbort,
    TransportError,
    UnsupportedOp,
)
from private_llm.kernels import ops
from tests.hf import tiny
from tests.hf.compare import BATCH, GREEDY, worst
from tests.hf.test_remote import free_ports, running

ASSISTED = PrivateConfig(protocol="assisted", timeout_s=30)
ERROR = 1e-3
"""Half a unit of 2^-15 of the largest weight in each product: with 64 inputs around 2 and weights up to 0.5 some 1e-4 a
layer, which ten layers pass on."""


@contextmanager
def assisted(kind: str, **settings: object) -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    """A tiny model of a family and its assisted self."""
    plain = tiny.build(kind)
    with patch(plain, replace(ASSISTED, **settings)) as private:
        yield plain, private


@pytest.mark.parametrize("kind", ["opt", "gpt2", "llama", "gemma2", "falcon", "bloom", "phi3"])
def test_decoders_say_what_their_plaintext_says(kind: str) -> None:
    with assisted(kind) as (plain, private), torch.no_grad():
        got, want = private(**BATCH).logits, plain(**BATCH).logits
        assert worst(got, want, BATCH["attention_mask"]) < ERROR
        assert torch.equal(private.generate(**BATCH, **GREEDY), plain.generate(**BATCH, **GREEDY))
        beams = {"max_new_tokens": 4, "num_beams": 3, "do_sample": False}
        assert torch.equal(private.generate(**BATCH, **beams), plain.generate(**BATCH, **beams))


@pytest.mark.parametrize("kind", ["bert", "distilbert", "modernbert", "t5", "vit"])
def test_encoders_and_images(kind: str) -> None:
    plain = tiny.build(kind)
    arguments = dict(BATCH)
    if kind == "t5":
        arguments["decoder_input_ids"] = BATCH["input_ids"]
    if kind == "vit":
        size = plain.config.image_size
        arguments = {"pixel_values": torch.randn(2, plain.config.num_channels, size, size)}
    with patch(plain, ASSISTED) as private, torch.no_grad():
        got, want = private(**arguments), plain(**arguments)
        for name in want.keys() & {"logits", "last_hidden_state", "pooler_output"}:
            assert worst(got[name], want[name]) < ERROR


def test_sampling_is_transformers_own() -> None:
    with assisted("llama") as (plain, private):
        said = []
        for model in (private, plain):
            torch.manual_seed(5)
            said.append(model.generate(**BATCH, max_new_tokens=5, do_sample=True, top_k=20))
        assert torch.equal(*said)


def test_it_is_the_models_own_class_without_weights_of_linear_layers() -> None:
    with assisted("llama") as (plain, private):
        assert isinstance(private, type(plain))
        names = [name for name, module in plain.named_modules() if type(module) is nn.Linear]
        assert all(private.get_submodule(name).weight.is_meta for name in names)
        assert not any(weight.lines.untyped_storage().nbytes() for weight, _ in private.parties._weights)
        assert private.num_parameters() == plain.num_parameters()
        sent = ("_proj.weight", "lm_head.weight")
        assert not any(value.is_meta for name, value in private.named_parameters() if not name.endswith(sent))
        with pytest.raises(PlaintextLeak, match="servers hold"):
            private.save_pretrained("anywhere")
        assert not private.training


def test_bytes_and_exchanges_are_those_of_the_shapes() -> None:
    """Queries, keys and values travel together, and so do gate and up: four exchanges a layer, and one for the head."""
    with assisted("llama") as (plain, private), torch.no_grad():
        private.cost(reset=True)
        private(input_ids=torch.tensor([[1, 2, 3]]))
        before = private.parties.exchanges
        private(input_ids=torch.tensor([[7, 5, 9]]))
        costs, config = private.cost(), plain.config
        hidden, inner = config.hidden_size, config.intermediate_size
        heads = config.num_key_value_heads * (hidden // config.num_attention_heads)
        up = config.num_hidden_layers * (3 * hidden + inner) + hidden
        down = config.num_hidden_layers * (hidden + 2 * heads + hidden + 2 * inner + hidden) + config.vocab_size
        assert private.parties.exchanges - before == 4 * config.num_hidden_layers + 1 == before
        assert costs.rounds == 2 * before
        asked = 2 * HEADER.size + len(fresh_label())
        assert costs.bytes_total == 2 * 3 * BYTES[16] * (up + 2 * down) + 2 * before * asked


def test_servers_see_masked_rows_or_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Server 1's rows are uniform whatever the input is, and no two are alike; server 0 gets no value at all."""
    seen: dict[int, list[Tensor]] = {0: [], 1: []}
    original = ProductServer.product

    def spy(self: ProductServer, x: Tensor, weight: object, rows: int) -> Tensor:
        seen[self.transport.me].append(x.clone() if x.dtype is torch.int64 else ops.unpacked(x, (rows, -1), 5))
        return original(self, x, weight, rows)

    monkeypatch.setattr(ProductServer, "product", spy)
    with assisted("llama") as (_, private), torch.no_grad():
        for _ in range(3):
            private(input_ids=torch.ones(1, 40, dtype=torch.int64))  # the same rows again and again
    for server, rows in seen.items():
        low = torch.cat([(each & 0xFF).view(-1) for each in rows])
        high = torch.cat([((each >> 32) & 0xFF).view(-1) for each in rows])
        for part in (low, high):
            counts = torch.bincount(part, minlength=256).double()
            expected = len(part) / 256
            assert float(((counts - expected) ** 2 / expected).sum()) < 400, server  # chi-square, 255 degrees
        values = torch.cat([each.view(-1) for each in rows])
        assert len(values.unique()) > 0.999 * len(values)


@pytest.mark.parametrize("liar", [0, 1])
def test_a_wrong_product_ends_the_call_and_names_the_server(liar: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = ProductServer.product, []

    def lie(self: ProductServer, x: Tensor, weight: object, rows: int) -> Tensor:
        made = original(self, x, weight, rows)
        if self.transport.me == liar:
            calls.append(1)
            if len(calls) == 7:
                made[-2] ^= 1  # one in 256 lies of 2^39 would name nobody
        return made

    monkeypatch.setattr(ProductServer, "product", lie)
    shown: list[int] = []
    streamer = SimpleNamespace(put=lambda value: shown.append(len(value)), end=lambda: None)
    with assisted("llama") as (_, private):
        with pytest.raises(ProtocolAbort, match=rf"^party {liar} gave a wrong product for 'model\.layers\.1") as told:
            private.generate(**BATCH, max_new_tokens=4, streamer=streamer)
        assert "withheld" in str(told.value)
        assert shown == [2]  # the prompt
        with pytest.raises(PartyFailed, match="over"):
            private(**BATCH)


def test_two_sessions_do_not_disturb_each_other() -> None:
    with assisted("opt") as (plain, one), patch(plain, ASSISTED) as two, torch.no_grad():
        first, second = (torch.tensor([[3, 4, 5]]), torch.tensor([[9, 8]]))
        for _ in range(2):
            assert worst(one(first).logits, plain(first).logits) < ERROR
            assert worst(two(second).logits, plain(second).logits) < ERROR


def test_processes_and_hosts_compute_the_same(checkpoint: object) -> None:
    plain = tiny.build("llama")
    want = plain.generate(**BATCH, **GREEDY)
    with patch(plain, replace(ASSISTED, party_mode="processes")) as private:
        assert torch.equal(private.generate(**BATCH, **GREEDY), want)
    remote = replace(ASSISTED, party_mode="remote", hosts=free_ports(2), allow_plain_loopback=True)
    with running(remote, [None, None], sessions=2) as lines:
        for _ in range(2):
            with AutoPrivateModelForCausalLM.from_pretrained(str(checkpoint), remote) as private:
                assert torch.equal(private.generate(**BATCH, **GREEDY), want)
    assert lines.count("session 2 ended") == 2


def test_servers_read_open_checkpoints_themselves(checkpoint: object) -> None:
    """Clients of several kinds send no weight; another checkpoint is refused before anything of an input leaves."""
    plain = tiny.build("llama")
    remote = replace(ASSISTED, party_mode="remote", hosts=free_ports(2), allow_plain_loopback=True)
    with running(remote, [None, None], checkpoint=str(checkpoint), sessions=4) as lines:
        for kind in (AutoPrivateModelForCausalLM, AutoPrivateModel):  # without a head there is a weight less
            with kind.from_pretrained(str(checkpoint), remote) as private, torch.no_grad():
                assert private.parties.stored
                got, want = (model(**BATCH, output_hidden_states=True).hidden_states for model in (private, plain))
                assert len(got) == len(want)
                assert worst(got[-1], want[-1], BATCH["attention_mask"]) < ERROR
                assert private.cost().bytes_total < 2e6
        with torch.no_grad():
            plain.model.layers[1].mlp.down_proj.weight[3, 4] += 0.01
        named = r"party 0 holds the weights of .*for 'model.layers.1.mlp.down_proj'; want"
        with pytest.raises(ConfigError, match=named):
            patch(plain, remote)
        servers = start_parties(remote)
        assert isinstance(servers, product_servers.ProductServers)
        servers.tell(LoadLines("a", 1, 1))
        with pytest.raises((PartyFailed, TransportError), match="multiplies by weights of"):
            servers.costs()
    assert lines.count("session 1 ended") == lines.count("session 2 ended") == 2
    told = "session 3 ended: the client stopped: party 0.* holds another checkpoint, of .*, than this client wants"
    assert sum(re.fullmatch(told, line) is not None for line in lines) == 2, lines
    assert lines[0].startswith(("party 0 waits for a client at ", "party 1 waits for a client at "))


def test_a_server_that_misses_a_weight_says_so() -> None:
    with assisted("opt") as (_, private):
        private.parties.tell(UseLines("a", "0" * 64))
        with pytest.raises((PartyFailed, TransportError), match="holds none with the digest"):
            private.cost()


def test_which_exchanges_there_are_follows_from_writing_never_from_values() -> None:
    with assisted("llama") as (plain, private), torch.no_grad():
        attention, original = private.model.layers[0].self_attn, plain.model.layers[0].self_attn
        for reach in (0.1, 9):  # clamping changes nothing, or something
            x = torch.randn(1, 3, plain.config.hidden_size) * reach
            before = private.parties.exchanges
            assert worst(attention.q_proj(x), original.q_proj(x)) < ERROR * max(reach, 1)
            assert worst(attention.v_proj(x), original.v_proj(x)) < ERROR * max(reach, 1)
            assert private.parties.exchanges == before + 1
            x.clamp_(-3, 3)
            assert worst(attention.k_proj(x), original.k_proj(x)) < ERROR * max(reach, 1)
            assert private.parties.exchanges == before + 2


def test_inference_mode_and_other_types() -> None:
    with assisted("llama") as (plain, private):
        with torch.inference_mode():
            assert worst(private(**BATCH).logits, plain(**BATCH).logits, BATCH["attention_mask"]) < ERROR
        assert private.device == torch.device("cpu")
        private.to("cpu").half()
        got = private(torch.tensor([[3, 4, 5]])).logits
        assert got.dtype == torch.float16
        assert worst(got.float(), plain(torch.tensor([[3, 4, 5]])).logits) < 0.05


def test_gradients_are_refused() -> None:
    with assisted("opt") as (plain, private):
        states = torch.randn(1, 2, plain.config.hidden_size, requires_grad=True)
        with pytest.raises(UnsupportedOp, match="no gradients"):
            private(inputs_embeds=states)


def test_whoever_computes_with_a_weight_that_is_elsewhere_gets_an_error() -> None:
    """PyTorch itself returns memory as it is for some products of tensors with and without values."""
    with assisted("llama") as (_, private):
        weight = private.lm_head.weight
        assert (weight.shape, weight.dtype, weight.is_meta) == ((128, 64), torch.float32, True)
        for use in (
            lambda: torch.ones(1, 64) @ weight.T,
            lambda: nn.functional.linear(torch.ones(1, 64), weight),
            lambda: weight[0],
            lambda: weight.div_(2),
            lambda: weight.data,
            lambda: torch.ones(1, 64) @ weight.detach().T,
            lambda: torch.cat([weight, weight]),
        ):
            with pytest.raises(UnsupportedOp, match=r"lm_head: .* choose another protocol"):
                use()
        with pytest.raises(PlaintextLeak):
            private.state_dict()


@pytest.mark.parametrize("kind", ["mamba", "mobilebert", "rwkv"])
def test_models_that_read_the_weights_of_layers_themselves_are_refused(kind: str) -> None:
    small = {"vocab_size": 60, "hidden_size": 32}
    config = {
        "mamba": lambda: transformers.MambaConfig(**small, num_hidden_layers=1, state_size=4),
        "mobilebert": lambda: transformers.MobileBertConfig(
            **small, num_hidden_layers=1, embedding_size=16, intra_bottleneck_size=16, num_attention_heads=2,
            intermediate_size=32,
        ),
        "rwkv": lambda: transformers.RwkvConfig(**small, num_hidden_layers=2, attention_hidden_size=32),
    }[kind]()  # fmt: skip
    made = transformers.AutoModelForMaskedLM if kind == "mobilebert" else transformers.AutoModelForCausalLM
    with pytest.raises(PatchMismatch):
        patch(made.from_config(config).eval(), ASSISTED)


def test_large_input_channels_cost_the_others_nothing() -> None:
    plain = tiny.build("llama")
    with torch.no_grad():
        for module in plain.modules():
            if isinstance(module, nn.Linear):
                module.weight[:, 0] *= 1e3
        want = plain(**BATCH).logits
        rough = tiny.build("llama").bfloat16()
        rough.load_state_dict(plain.state_dict())
        lost = worst(rough(**BATCH).logits.float(), want, BATCH["attention_mask"])
        with patch(plain, ASSISTED) as private:
            assert worst(private(**BATCH).logits, want, BATCH["attention_mask"]) < lost / 8


def test_many_rows_go_in_several_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    with assisted("llama") as (plain, private), torch.no_grad():
        private(torch.ones(1, 7, dtype=torch.int64))
        whole = private.parties.exchanges
        monkeypatch.setattr(product_servers, "_MACS_AT_ONCE", 64 * 64 * 3)
        ids = torch.arange(7)[None] + 3
        assert worst(private(ids).logits, plain(ids).logits) < ERROR
        assert private.parties.exchanges > 3 * whole


def test_a_server_refuses_what_it_cannot_do() -> None:
    request = HEADER.pack
    for server, asked, want in (
        (1, request(0, 1) + b"a label", "with the key of masks takes a label"),
        (0, request(0, 1) + bytes(1000), "with the key of masks takes a label"),
        (1, request(99, 1), "weight 99 was not loaded"),
        (1, request(0, 1 << 22), "fewer at a time"),
        (0, request(0, 0) + b"a label", "one at least"),
        (1, b"12", "want 8 and what"),
        (1, LoadLines("a", 1 << 22, 1 << 22), "bytes in all"),
    ):
        with assisted("opt") as (_, private):
            if isinstance(asked, bytes):
                private.parties.transport.send_bytes(server, REQUEST, asked)
            else:
                private.parties.tell(asked, [server])
            with pytest.raises((PartyFailed, ConnectionError), match=want):
                private(torch.tensor([[3, 4]]))


def test_inputs_of_another_width_are_refused_before_anything_is_sent() -> None:
    """Kernels would read beyond them, or send what lay in memory."""
    with assisted("t5") as (plain, private), torch.no_grad():
        before = private.parties.exchanges
        for width in (8, 200000):
            states = torch.zeros(1, 5, width)
            given = {"encoder_outputs": (states,), "decoder_input_ids": torch.tensor([[3]])}
            with pytest.raises(DomainError, match=rf"EncDecAttention.*got {width} inputs; want {plain.config.d_model}"):
                private(**given)
        for asked in (private.lm_head, private.decoder.block[0].layer[0].SelfAttention.q):
            with pytest.raises(DomainError, match="got 3 inputs"):
                asked(torch.zeros(2, 3))
        assert private.parties.exchanges - before == 6  # what comes before the first keys of another width


def test_threads_that_call_one_model_do_not_disturb_each_other() -> None:
    with assisted("llama") as (plain, private), torch.no_grad():
        texts = [torch.arange(3, 9)[None] + n for n in range(4)]
        want = [plain(ids).logits for ids in texts]

        @torch.no_grad()
        def call(number: int) -> list[float]:
            return [worst(private(texts[number]).logits, want[number]) for _ in range(6)]

        with ThreadPoolExecutor(4) as pool:
            assert max(map(max, pool.map(call, range(4)))) < ERROR


def test_few_bytes_make_no_server_need_much_memory() -> None:
    """Lines are padded to 32 elements: a weight of one input has 32."""
    with assisted("opt") as (_, private), torch.no_grad():
        private.parties.load(IntegerWeight.of(torch.ones(1, 1)), "small")
        private.parties.transport.send_bytes(0, REQUEST, HEADER.pack(len(private.parties._weights) - 1, 1 << 21) + b"a")
        with pytest.raises((PartyFailed, ConnectionError), match="fewer at a time"):
            private(torch.tensor([[3, 4]]))


def test_no_value_leaves_another_way() -> None:
    with assisted("opt") as (_, private), pytest.raises(PlaintextLeak, match="leave masked"):
        private.parties.end.share(torch.ones(2, dtype=torch.int64))


def test_drafts_of_transformers_work() -> None:
    with assisted("llama") as (plain, private):
        more = {"prompt_lookup_num_tokens": 2, **GREEDY}
        ids = torch.tensor([[5, 6, 7, 5, 6]])
        assert torch.equal(private.generate(ids, **more), plain.generate(ids, **more))


def test_settings_of_shares_are_refused() -> None:
    for setting in ({"ring": 32}, {"reveal": "token"}, {"split": 1}, {"device_map": "auto"}, {"parallel_sessions": 2}):
        with pytest.raises(ConfigError, match=f"^{next(iter(setting))}: .* no such setting"):
            replace(ASSISTED, **setting)  # type: ignore[arg-type]
    assert ASSISTED.weights == "public"
    assert ASSISTED.endpoints == 2


def test_unfit_values_name_their_layer() -> None:
    plain = tiny.build("llama")
    with torch.no_grad():
        plain.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(DomainError, match=r"weight of 'model.layers.1.mlp.gate_proj.model.layers.1.mlp.up_"):
        patch(plain, ASSISTED)
    with assisted("llama") as (plain, private), torch.no_grad():
        states = torch.full((1, 2, plain.config.hidden_size), float("inf"))
        with pytest.raises(DomainError, match=r"model\.layers\.0\.self_attn\.q_proj\+.*finite"):
            private(inputs_embeds=states)
        assert worst(private(**BATCH).logits, plain(**BATCH).logits, BATCH["attention_mask"]) < ERROR


def test_experts_with_rows_of_their_own_stay_at_the_client() -> None:
    """Servers would see how many rows each of them reads."""
    plain = tiny.build("llama")

    def build(self: PreTrainedModel, config: object) -> None:
        transformers.LlamaForCausalLM.__init__(self, config)
        for layer in self.model.layers:
            layer.mlp.experts = nn.ModuleList([layer.mlp.down_proj])
            del layer.mlp.down_proj
            layer.mlp.forward = partial(_one_expert, layer.mlp)

    made = type("LlamaForCausalLM", (transformers.LlamaForCausalLM,), {"__init__": build})
    values = {name.replace("down_proj", "experts.0"): value for name, value in plain.state_dict().items()}

    def weights(wanted: WeightList, sink: Sink, local: bool) -> None:
        for name in wanted.shapes:
            sink(name, values[name])

    private = open_assisted(made, plain.config, weights, start_parties(ASSISTED), None)
    with torch.no_grad():
        assert worst(private(**BATCH).logits, plain(**BATCH).logits, BATCH["attention_mask"]) < ERROR
        assert not any("experts" in name for name in private.parties._names)
        private.close()


def _one_expert(mlp: nn.Module, x: Tensor) -> Tensor:
    states = mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)
    made = torch.zeros_like(x)
    for first in (True, False):
        some = (x[..., 0] > 0) == first
        made[some] = mlp.experts[0](states[some])
    return made


def test_training_is_refused_and_nothing_is_recorded_for_it() -> None:
    with assisted("opt") as (_, private):
        with pytest.raises(NotImplementedError, match="inference only"):
            private.train()
        assert not private(torch.tensor([[3, 4]])).logits.requires_grad
