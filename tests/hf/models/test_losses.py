"""`labels=`: the client's loss is the plaintext class's; labels that do not fit are refused before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers as tr
from private_llm_hf import PrivateConfig, patch
from private_llm_hf.checkpoint.miniature import miniature
from torch import Tensor
from transformers import PreTrainedModel

from private_llm.errors import DomainError, UnsupportedOp
from tests.hf import tiny
from tests.hf.compare import LOGIT_ERROR
from tests.hf.conftest import PLAIN, TRIO

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
TOKENS = torch.tensor([[5, -100, 7, 127], [9, 10, 0, -100]])
CLASSES = torch.tensor([1, 0])
MIXED = torch.tensor([[1.0, 0.0], [1.0, 1.0]])


def close(model: PreTrainedModel, inputs: dict[str, Tensor], labels: Tensor, config: PrivateConfig = PLAIN) -> None:
    """A loss is an average of differences of logits, so it is off by no more than twice their error."""
    with torch.no_grad():
        want = model(**inputs, labels=labels)
        with patch(model, config) as private:
            out = private(**inputs, labels=labels)
            first = private(**inputs, labels=labels, return_dict=False)[0]
    assert out.loss.shape == want.loss.shape == ()
    assert out.loss.dtype == torch.float32
    assert abs(float(out.loss) - float(want.loss)) < 2 * LOGIT_ERROR
    assert abs(float(first) - float(want.loss)) < 2 * LOGIT_ERROR
    assert next(iter(out)) == "loss"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", list(tiny.DECODERS))
def test_next_tokens(name: str) -> None:
    close(tiny.build(name), {"input_ids": IDS}, TOKENS)


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("bert", tr.BertForMaskedLM),
        ("roberta", tr.RobertaForMaskedLM),
        ("distilbert", tr.DistilBertForMaskedLM),
        ("modernbert", tr.ModernBertForMaskedLM),
    ],
)
def test_masked_tokens(name: str, cls: type[PreTrainedModel]) -> None:
    close(tiny.build(name, cls), {"input_ids": IDS}, TOKENS)


def test_masked_tokens_of_three_parties() -> None:
    close(tiny.build("bert", tr.BertForMaskedLM), {"input_ids": IDS}, TOKENS, TRIO)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("bert", tr.BertForSequenceClassification),
        ("distilbert", tr.DistilBertForSequenceClassification),
        ("llama", tr.LlamaForSequenceClassification),
    ],
)
@pytest.mark.parametrize(
    ("count", "problem", "labels"),
    [
        (2, None, CLASSES),
        (1, None, torch.tensor([0.5, -1.0])),
        (2, None, MIXED),
        (2, "regression", MIXED),
        (2, "single_label_classification", CLASSES),
    ],
)
def test_classes_of_texts(
    name: str, cls: type[PreTrainedModel], count: int, problem: str | None, labels: Tensor
) -> None:
    settings = {"num_labels": count, "problem_type": problem, "pad_token_id": 0}
    close(tiny.build(name, cls, **settings), {"input_ids": IDS}, labels)


def test_classes_of_tokens_and_of_images() -> None:
    model = tiny.build("bert", tr.BertForTokenClassification, num_labels=3)
    close(model, {"input_ids": IDS}, torch.tensor([[0, 1, 2, -100], [2, 2, 0, 1]]))
    images = torch.rand(2, 3, 16, 16)
    close(tiny.build("vit", tr.ViTForImageClassification), {"pixel_values": images}, CLASSES)


def test_an_encoder_decoder_reads_its_labels_shifted() -> None:
    close(tiny.build("t5"), {"input_ids": IDS}, TOKENS)
    close(tiny.build("t5"), {"input_ids": IDS, "decoder_input_ids": torch.tensor([[0, 3, 4, 5]] * 2)}, TOKENS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["Bart", "MBart", "Pegasus", "Blenderbot", "PLBart", "BlenderbotSmall"])
def test_each_family_shifts_its_labels_in_its_own_way(family: str) -> None:
    model = miniature(getattr(tr, f"{family}ForConditionalGeneration"), getattr(tr, f"{family}Config")())
    ids = torch.arange(5, 13).view(2, 4)
    close(model, {"input_ids": ids}, torch.where(ids == 8, -100, ids))


def test_a_model_that_names_no_start_wants_the_decoders_inputs() -> None:
    refused = pytest.raises(UnsupportedOp, match=r"labels: T5ForConditionalGeneration: .*give decoder_input_ids")
    with patch(tiny.build("t5", decoder_start_token_id=None), PLAIN) as private, refused:
        private(input_ids=IDS, labels=TOKENS)


# -- what does not fit ----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def opt() -> Iterator[PreTrainedModel]:
    with patch(tiny.build("opt"), PLAIN) as private:
        yield private


@pytest.fixture(scope="module")
def bert() -> Iterator[PreTrainedModel]:
    with patch(tiny.build("bert", tr.BertForSequenceClassification), PLAIN) as private:
        yield private


@pytest.mark.parametrize(
    ("labels", "more", "message"),
    [
        ([[1, 2]], {}, "got list; want a tensor"),
        (TOKENS.float(), {}, r"got torch.float32, shape \(2, 4\); want integers \[batch, length\]"),
        (TOKENS[:, :3], {}, r"got shape \(2, 3\); want \(2, 4\), as the inputs"),
        (TOKENS + 1, {}, r"out of range; want 0 to 127, or -100"),
        (TOKENS, {"logits_to_keep": 1}, "got logits_to_keep=1; want the logits of all positions"),
    ],
)
def test_labels_of_tokens_that_do_not_fit(
    opt: PreTrainedModel, labels: object, more: dict[str, int], message: str
) -> None:
    opt.cost(reset=True)
    with pytest.raises(DomainError, match=f"labels: .*{message}"):
        opt(input_ids=IDS, labels=labels, **more)
    assert opt.cost().bytes_total == 0


@pytest.mark.parametrize("labels", [torch.tensor([0, 2]), torch.tensor([0, 1, 1]), torch.tensor([[1.0]])])
def test_labels_of_classes_that_do_not_fit(bert: PreTrainedModel, labels: Tensor) -> None:
    bert.cost(reset=True)
    with pytest.raises(DomainError, match=r"labels: got .* for 2 row\(s\) and 2 class\(es\): "):
        bert(input_ids=IDS, labels=labels)
    assert bert.cost().bytes_total == 0
    assert bert.config.problem_type is None


def test_no_loss_without_a_head_or_without_logits() -> None:
    with (
        patch(tiny.build("bert"), PLAIN) as private,
        pytest.raises(UnsupportedOp, match="labels: BertModel has no head"),
    ):
        private(input_ids=IDS, labels=IDS)
    token = PrivateConfig(protocol="plain", insecure=True, reveal="token")
    with patch(tiny.build("opt"), token) as private, pytest.raises(UnsupportedOp, match="reveal='token' does not open"):
        private(input_ids=IDS, labels=IDS)


def test_a_decoder_that_does_not_shift_its_labels_has_no_loss_here() -> None:
    """TrOCR's loss compares each position with its own label: the usual loss of decoders would be another number."""
    model = miniature(tr.TrOCRForCausalLM, tr.TrOCRConfig())
    ids = torch.arange(5, 11).view(1, 6)
    refused = pytest.raises(UnsupportedOp, match="does not compare them with the next tokens")
    with patch(model, PLAIN) as private, refused:
        private(input_ids=ids, labels=ids)
