"""Token sharding as its users meet it: what they may pass in, what they are told, and what is left behind."""

from __future__ import annotations

import signal
import threading
from importlib import resources

import pytest
import torch
import transformers as tr
from private_llm_cli.app import app
from private_llm_cli.commands.text import by_link
from private_llm_hf import AutoPrivateModelForCausalLM, PrivateConfig, patch
from typer.testing import CliRunner

from private_llm.errors import ConfigError, DomainError, PartyFailed, PrivateLLMError
from private_llm.token_sharding import ShardingPlan
from tests.hf import tiny

PLAN = ShardingPlan(3, 3, 1, accept_weak_plan=True)  # for models with grouped queries
TEXT = "The old bridge over the river was built of stone, and the people of the town"

# float32 everywhere; two layers, sums in another order: a few units of 2^-23 at magnitudes up to about 10.
ERROR = 2e-5


def settings(plan: ShardingPlan = PLAN, **more: object) -> PrivateConfig:
    return PrivateConfig.from_dict({"protocol": "cascade", "plan": plan, "timeout_s": 30, **more})


def text(rows: int = 2, length: int = 17) -> torch.Tensor:
    return torch.randint(3, 100, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folder() -> str:
    return str(resources.files("private_llm_hf").joinpath("demo_model"))


# -- plans -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"alpha": True}, "plan.alpha: got True"),
        ({"alpha": "3"}, "plan.alpha: got '3'"),
        ({"c": 2.0}, "plan.c: got 2.0"),
        ({"c": 9, "m": 2}, "want a divisor of c"),
        ({"accept_weak_plan": "no"}, "accept_weak_plan: got 'no'"),
        ({"wire": "bfloat16"}, "plan.wire"),
    ],
)
def test_plans_of_wrong_types_are_refused(values: dict[str, object], complaint: str) -> None:
    """A JSON file that says "no" must not turn the check of weak plans off."""
    with pytest.raises(ConfigError, match=complaint):
        ShardingPlan(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["audit", ","], "want alpha,c,m"),
        (["audit", "8,8"], "want alpha,c,m"),
        (["audit", "8,8,2", "--colluding", "0,x"], "want endpoint numbers"),
        (["audit", "8,8,2", "--colluding", "0,999"], "want endpoints from 0"),
        (["demo", "--protocol", "cascade", "--plan", "3,9,2"], "want a divisor"),
        (["demo", "--protocol", "cascade", "--plan", "3,1,1"], "gives tokens away"),
        (["generate", "nowhere", "--prompt", "x", "--protocol", "trio", "--plan", "3,9,1"], "sharding plans are for"),
    ],
)
def test_the_command_line_names_what_is_wrong_with_a_plan(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, PrivateLLMError)
    assert complaint in str(result.exception)


# -- models ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints_run_in_float32(kind: torch.dtype) -> None:
    """Nodes compute in float32: the result is that of the float32 model with the checkpoint's rounded weights."""
    model = tiny.build("llama")
    exact = {name: value.to(kind) for name, value in model.state_dict().items()}
    model.load_state_dict({name: value.float() for name, value in exact.items()})
    half = tiny.build("llama").to(kind)
    half.load_state_dict(exact)
    with torch.no_grad(), patch(half, settings()) as private:
        found = private(text()).logits
        expected = model(text()).logits
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max()) < ERROR


def test_dropout_of_a_model_in_training_mode_does_not_reach_the_nodes() -> None:
    model = tiny.build("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).train()
    with torch.no_grad(), patch(model, settings()) as private:
        found, expected = private(text()).logits, model.eval()(text()).logits
    assert float((found - expected).abs().max()) < ERROR


HEADS = [
    ("bert", tr.BertForSequenceClassification),
    ("bert", tr.BertForQuestionAnswering),
    ("bert", tr.BertForTokenClassification),
    ("roberta", tr.RobertaForSequenceClassification),
    ("llama", tr.LlamaForTokenClassification),
    ("opt", tr.OPTForQuestionAnswering),
]


@pytest.mark.parametrize(("name", "cls"), HEADS, ids=lambda value: getattr(value, "__name__", value))
def test_heads_and_segments(name: str, cls: type[tr.PreTrainedModel]) -> None:
    model = tiny.build(name, cls)
    ids = text()
    mask = torch.ones_like(ids)
    mask[1, -5:] = 0
    if name == "roberta":
        ids[1, -5:] = model.config.pad_token_id
    more = {"token_type_ids": (torch.arange(17) > 8).long().expand(2, -1)} if name == "bert" else {}
    with torch.no_grad(), patch(model, settings()) as private:
        expected, found = model(ids, attention_mask=mask, **more), private(ids, attention_mask=mask, **more)
    assert found.keys() == expected.keys()
    for key in expected:
        by_row = expected[key].shape[1] == 17
        difference = (expected[key] - found[key]).abs()
        assert float((difference[mask.bool()] if by_row else difference).max()) < ERROR


def test_padding_on_either_side_and_in_the_middle() -> None:
    model = tiny.build("opt")
    mask = torch.ones(3, 17, dtype=torch.int64)
    mask[0, :5], mask[1, -5:], mask[2, 7:9] = 0, 0, 0
    with torch.no_grad(), patch(model, settings()) as private:
        difference = model(text(3), attention_mask=mask).logits - private(text(3), attention_mask=mask).logits
    assert float(difference.abs()[mask.bool()].max()) < ERROR


# -- generate() --------------------------------------------------------------------------------------------------------
def test_generate_s_own_ways(folder: str) -> None:
    """Stop strings, a streamer, a pipeline with left padding, a guessing assistant, a conversation that goes on."""
    tokenizer = tr.AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = tr.AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(TEXT, return_tensors="pt")
    with AutoPrivateModelForCausalLM.from_pretrained(folder, settings()) as private:
        streamer = tr.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
        for more in (
            {"stop_strings": ["town"], "tokenizer": tokenizer},
            {"prompt_lookup_num_tokens": 3},
            {"repetition_penalty": 1.3, "streamer": streamer},
        ):
            expected = model.generate(**inputs, max_new_tokens=8, do_sample=False, **{**more, "streamer": None})
            found = private.generate(**inputs, max_new_tokens=8, do_sample=False, **more)
            assert torch.equal(found, expected)
        assert "".join(streamer) == tokenizer.decode(expected[0, inputs["input_ids"].shape[1] :])
        prompts = [TEXT, "The mayor of the town said that the river"]
        texts = [
            tr.pipeline("text-generation", model=who, tokenizer=tokenizer)(
                prompts, max_new_tokens=6, do_sample=False, batch_size=2
            )
            for who in (private, model)
        ]
        assert texts[0] == texts[1]
        first = private.generate(**inputs, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
        second = private.generate(
            first.sequences, past_key_values=first.past_key_values, max_new_tokens=3, do_sample=False
        )
        assert torch.equal(second, model.generate(**inputs, max_new_tokens=6, do_sample=False))


def test_threads_share_a_model() -> None:
    model = tiny.build("llama")
    wrong: list[int] = []
    with patch(model, settings()) as private:

        def use(length: int) -> None:
            ids = text(1, length)
            options = {"max_new_tokens": 6, "do_sample": False}
            if not torch.equal(private.generate(ids, **options), model.generate(ids, **options)):
                wrong.append(length)

        threads = [threading.Thread(target=use, args=(length,)) for length in (11, 14, 17)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_an_interrupt_leaves_no_thread_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a step: the session is over and says so, and its nodes are gone."""
    from private_llm_hf.client.nodes import Nodes

    def interrupted(self: Nodes, *_: object) -> None:
        signal.raise_signal(signal.SIGINT)  # in this thread and now; os.kill may choose another, and return before

    private = patch(tiny.build("llama"), settings())
    monkeypatch.setattr(Nodes, "_outputs", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            private(text())
    finally:
        signal.signal(signal.SIGINT, before)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("party")]
    with pytest.raises(PartyFailed, match="session is over"):
        private(text())
    private.close()
    private.close()


@pytest.mark.parametrize("moment", ["stop", "abort"])
def test_an_interrupt_at_the_end_leaves_no_thread_behind(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Ctrl-C while a session is being closed, or while it is being given up."""
    from private_llm_hf.client.parties import Parties

    from private_llm.net.local import LocalTransport

    private = patch(tiny.build("llama"), settings())
    owner = Parties if moment == "stop" else LocalTransport
    before = getattr(owner, moment)

    def interrupted(self: object, *given: object) -> None:
        monkeypatch.setattr(owner, moment, before)
        if moment == "abort":
            before(self, *given)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, moment, interrupted)
    if moment == "abort":
        monkeypatch.setattr(Parties, "_answer", lambda *_: 1 / 0)
    with pytest.raises(KeyboardInterrupt):
        _ = private.close() if moment == "stop" else private(text())
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("party")]


def test_bad_inputs_leave_the_session_usable() -> None:
    model = tiny.build("gpt2")
    ids = text()
    with torch.no_grad(), patch(model, settings(ShardingPlan(3, 3, 1))) as private:
        for wrong in (
            ids[:, :0],
            ids[0],
            ids.float(),
            ids + 100,
            ids[:, :1],
            ids.repeat(1, 4),
            ids[:, :1].expand(2, 3),
        ):
            with pytest.raises(DomainError):
                private(wrong)
        with pytest.raises(DomainError):
            private(ids, position_ids=torch.arange(60, 77).unsqueeze(0))
        with pytest.raises(DomainError):
            private(ids, past_key_values=model(ids).past_key_values)
        assert float((private(ids).logits - model(ids).logits).abs().max()) < ERROR


def test_costs_are_told_by_kind_of_node() -> None:
    config = settings()
    with patch(tiny.build("llama"), config) as private:
        private(text())
        costs = private.cost()
    found = by_link(costs, config)
    assert set(found) == {
        f"{a} to {b}" for a, b in [("client", "CompNodes"), ("CompNodes", "AttnNodes"), ("AttnNodes", "CompNodes")]
    } | {"CompNodes to client"}
    assert sum(found.values()) == costs.bytes_total
