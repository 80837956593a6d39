"""The learned attack's two halves that need transformers: what nodes see, and the attacked model as the one who reads.

As in the paper, the attacker starts from the attacked model itself with the causal mask taken away.
"""

import copy
import inspect
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from attacks.inversion import Inverter
from private_llm.errors import DomainError, PatchMismatch

_SURE = 20.0
"""The logit of the right token for a row that is its embedding, before training."""


class SeenRows:
    """What the holder of a position has of it: states after the given layers, side by side; 0: the token.

    States after the model's last layer come normed.
    An AttnNode's queries, keys and values of the next layer are functions of these states. Raises DomainError unless
    layers are different numbers from 0 to the model's.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        count = model.config.get_text_config().num_hidden_layers
        if not layers or len(set(layers)) != len(layers) or not all(0 <= layer <= count for layer in layers):
            raise DomainError(f"layers: got {list(layers)}; want different numbers from 0 to {count}")
        self.layers = tuple(layers)
        # One layer more than needed, because the last one's states come normed; the rest would be computed in vain.
        config = copy.deepcopy(model.config)
        config.num_hidden_layers = min(max(layers) + 1, count)
        short = type(model)(config).eval()
        short.load_state_dict(model.state_dict(), strict=False)
        self._model = short.base_model.to(model.device)

    def __call__(self, ids: Tensor) -> Tensor:
        """Ids [B, n] to [B, n, numbers of a row]."""
        with torch.no_grad():
            tokens: Tensor = self._model.get_input_embeddings()(ids)
            if self.layers == (0,):
                return tokens
            states = self._model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        return torch.cat([states[layer] if layer else tokens for layer in self.layers], -1)


class BothWays(nn.Module):
    """A causal model that sees its rows in both directions: rows [B, n, d] to logits [B, n, V].

    The model's own output at a position is about the next token, so it is moved one place to the right; what a row
    says about its own token is its product with the embeddings. So untrained it already knows the tokens of rows that
    look like embeddings, and guesses those that follow them. (The first place has its own row only: the start token.)
    Raises PatchMismatch for a model whose forward takes no inputs_embeds or position_ids.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        accepted = inspect.signature(type(model).forward).parameters
        missing = [name for name in ("inputs_embeds", "position_ids") if name not in accepted]
        if missing:
            raise PatchMismatch(f"{type(model).__name__}: cannot read rows, its forward takes no {', '.join(missing)}")
        self.model = copy.deepcopy(model).float().eval()
        lengths = self._table().detach().square().sum(-1).mean()
        self.gain = nn.Parameter(_SURE / lengths)

    def forward(self, rows: Tensor) -> Tensor:
        """See the class."""
        batch, length, _ = rows.shape
        # A mask of four dimensions is taken as it is; zeros are added to the scores and hide nothing.
        everything = rows.new_zeros(batch, 1, length, length)
        positions = torch.arange(length, device=rows.device).expand(batch, length)
        guessed = self.model(
            inputs_embeds=rows, attention_mask=everything, position_ids=positions, use_cache=False
        ).logits
        own: Tensor = self.gain * F.linear(rows, self._table())
        return own + F.pad(guessed[:, :-1], (0, 0, 1, 0))

    def _table(self) -> Tensor:
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight


def reader(model: PreTrainedModel) -> Inverter:
    """An untrained attacker that reads tokens (layer 0) as the model does."""
    width = model.get_input_embeddings().weight.shape[1]
    made = Inverter(BothWays(model), width, width).to(model.device)
    nn.init.eye_(made.adapter.weight)
    nn.init.zeros_(made.adapter.bias)
    return made


def reader_of(start: Inverter, before: SeenRows, after: SeenRows, ids: Tensor) -> Inverter:
    """The attacker `start`, which reads `before`, put to read `after`; ids [B, n]: texts to fit its adapter on."""
    rows = after(ids).flatten(0, 1)
    made = Inverter(start.body, rows.shape[-1], start.unseen.shape[0]).to(ids.device)
    made.take_over(start, rows, before(ids).flatten(0, 1))
    return made
