"""Layers of predicted neurons: FC2's weights lie where single neurons are read."""

from __future__ import annotations

import torch
from torch import nn

from private_llm.config import PrivateConfig
from private_llm.nn.predicted import ActivityPredictor, SparseFeedForward
from private_llm.protocols.session import meta_session
from private_llm.protocols.share import Share
from private_llm.tensor.fixed import Fixed
from private_llm.tensor.secret import SecretTensor


def test_weights_of_fc2_lie_neuron_by_neuron() -> None:
    session = meta_session(PrivateConfig(protocol="trio"), 1)
    parts = tuple(torch.arange(6 * 8).view(6, 8) for _ in range(2))
    writer = nn.Linear(8, 6, bias=False)
    writer.weight = nn.Parameter(SecretTensor(Fixed(session, Share(parts), 18)), requires_grad=False)

    def sparse() -> tuple[torch.Tensor, ...]:
        reader = nn.Linear(4, 8)
        SparseFeedForward(ActivityPredictor(4, 2, 8), [reader], writer, 1, 2, "fc1")
        assert isinstance(writer.weight, SecretTensor)
        return writer.weight.value(full=True).share.parts

    once = sparse()
    again = sparse()  # as another parallel session that takes the same memory
    assert all(part.t().is_contiguous() and torch.equal(part, own) for part, own in zip(once, parts, strict=True))
    assert [part.data_ptr() for part in again] == [part.data_ptr() for part in once]
