"""Tokenizers that differ in what they put around a text."""

from __future__ import annotations

from importlib import resources

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for turn in messages %}[{{ turn.role }}] {{ turn.content | trim }} [end]\n{% endfor %}{{ '[assistant]\n' }}"
)


def demo(template: str | None = None) -> PreTrainedTokenizerFast:
    """The bundled one: BPE, a start token; with a chat template if asked."""
    made: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(resources.files("private_llm_hf") / "demo_model")
    made.chat_template = template
    return made


def bare() -> PreTrainedTokenizerFast:
    """Each byte is a token; nothing is put around a text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def closed() -> PreTrainedTokenizerFast:
    """As `bare`, but a text begins with token 256 and ends with token 257."""
    made = bare()
    inner = made.backend_tokenizer
    inner.add_special_tokens(["[CLS]", "[SEP]"])
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 256), ("[SEP]", 257)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner)


KINDS = {"demo": demo, "chat": lambda: demo(TEMPLATE), "bare": bare, "closed": closed}
