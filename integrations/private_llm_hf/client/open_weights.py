"""What a server of protocol "assisted" reads of a checkpoint, so that its clients need not send it."""

import functools

import torch
from safetensors import SafetensorError

from private_llm.errors import ConfigError, PrivateLLMError
from private_llm_hf.checkpoint.checkpoint import Checkpoint
from private_llm_hf.checkpoint.model_spec import named_class
from private_llm_hf.client.assisted_model import built
from private_llm_hf.client.assisted_rows import RowCounts
from private_llm_hf.party.product_server import OpenWeights


def open_weights(source: str, device: torch.device, weight_bits: int = 16) -> OpenWeights:
    """The weights of a model folder or hub id, in the groups and numbers in which clients ask for them, on a device.

    Raises ConfigError if there is no such checkpoint, or no room for it, PatchMismatch for one that 'assisted' does not
    run.
    """
    held = OpenWeights(source, device, weight_bits)
    try:
        checkpoint = Checkpoint(source)
        config = checkpoint.config()
        found = named_class(source, config)
        built(found, config, functools.partial(checkpoint.stream, found, config), held, RowCounts(), "servers")
    except PrivateLLMError:
        raise
    except (OSError, ValueError, SafetensorError, torch.OutOfMemoryError) as error:  # also of transformers
        raise ConfigError(f"model {source!r}: {str(error).splitlines()[0]}") from None
    return held
