"""Drafts under protocol "assisted": every check of them has the same number of rows, which is what servers see.

How many drafted tokens were accepted stays here, because the cache is here. Servers see how many checks a text took.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig
from transformers.generation.candidate_generator import CandidateGenerator

from private_llm_hf.client.generation_settings import check_arguments
from private_llm_hf.client.speculation import DEFAULT_COUNTS, SpeculationConfig
from private_llm_hf.client.speculative_loop import decoding


class DraftsOfOneLength:
    """What `generate` of models under "assisted" does with drafts, in front of transformers' own class."""

    def generate(self, *args: Any, speculation: SpeculationConfig | None = None, **kwargs: Any) -> Any:  # noqa: ANN401
        """As transformers' own; with `speculation` as `generate` under other protocols (docs/speculation.md).

        By default every check reads DEFAULT_COUNTS.window rows and all that are right go on. Raises ConfigError,
        DomainError and UnsupportedOp for what speculation does not do, before anything is sent.
        """
        if speculation is not None:
            check_arguments(args, kwargs, self.config.get_text_config().vocab_size, speculation)  # type: ignore[attr-defined]
            if speculation.fixed_counts is None and not speculation.open_counts and speculation.length is None:
                speculation = replace(speculation, length=DEFAULT_COUNTS.window - 1)
            kwargs["custom_generate"] = decoding(speculation, kwargs.get("streamer"), beyond=True)
        return super().generate(*args, **kwargs)  # type: ignore[misc]

    def _get_candidate_generator(self, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> "_OneLength":  # noqa: ANN401
        """transformers' own drafts (assistant_model, prompt_lookup_num_tokens), as many tokens in every check."""
        made = super()._get_candidate_generator(generation_config, *args, **kwargs)  # type: ignore[misc]
        return _OneLength(made, generation_config.max_length)


class _OneLength(CandidateGenerator):  # type: ignore[misc]
    """Another's drafts, filled up to the most that it drafts; fewer only before the longest text that was asked for.

    Filled in is the last token again, with certainty, so whether it is accepted follows the rules for drafts.
    """

    def __init__(self, inner: CandidateGenerator, limit: int) -> None:
        self._inner, self._limit, self._drafted = inner, limit, 0
        self._length: int = getattr(inner, "num_output_tokens", None) or inner.num_assistant_tokens

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def get_candidates(self, input_ids: Tensor, **more: object) -> tuple[Tensor, Tensor | None]:
        """The text and what is drafted after it [1, n], and logits of that [1, drafted, V], if the draft has some."""
        ids, logits = self._inner.get_candidates(input_ids, **more)
        end = input_ids.shape[1] + max(0, min(self._length, self._limit - input_ids.shape[1] - 1))
        ids = ids[:, :end]
        self._drafted, missing = ids.shape[1] - input_ids.shape[1], end - ids.shape[1]
        last = int(input_ids[0, -1])
        if logits is not None:
            certain = torch.full((1, missing, logits.shape[-1]), -torch.inf)
            certain[..., last] = 0.0
            logits = torch.cat([logits[:, : self._drafted], certain.to(logits)], 1)
        return functional.pad(ids, (0, missing), value=last), logits

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Tell the draft of its own tokens."""
        drafted = self._drafted
        self._inner.update_candidate_strategy(input_ids, scores[:, : drafted + 1], min(int(num_matches), drafted))
