"""Token sharding (Cascade): plans and nodes. Statistical protection, no part of secret sharing.

Others take what they use from here: `from private_llm.token_sharding import NAME`. A module is imported when one of its
names is first asked for, because settings hold plans while nodes use what lies above the settings.
"""

from typing import TYPE_CHECKING

from private_llm.importing import lazy_names

if TYPE_CHECKING:
    from private_llm.token_sharding.nodes.attn_node import AttnNode as AttnNode
    from private_llm.token_sharding.nodes.exchange import Exchange as Exchange
    from private_llm.token_sharding.nodes.facts import AttentionCall as AttentionCall
    from private_llm.token_sharding.nodes.facts import ForwardStep as ForwardStep
    from private_llm.token_sharding.nodes.facts import Piece as Piece
    from private_llm.token_sharding.nodes.facts import allowed as allowed
    from private_llm.token_sharding.nodes.facts import attend as attend
    from private_llm.token_sharding.nodes.facts import combine as combine
    from private_llm.token_sharding.nodes.facts import key_bias as key_bias
    from private_llm.token_sharding.nodes.floats import number_type as number_type
    from private_llm.token_sharding.nodes.floats import recv_floats as recv_floats
    from private_llm.token_sharding.nodes.floats import send_floats as send_floats
    from private_llm.token_sharding.nodes.stage_costs import HELD as HELD
    from private_llm.token_sharding.nodes.stage_costs import Card as Card
    from private_llm.token_sharding.nodes.stage_costs import Sent as Sent
    from private_llm.token_sharding.nodes.stage_costs import Stage as Stage
    from private_llm.token_sharding.nodes.stage_costs import attention_stages as attention_stages
    from private_llm.token_sharding.nodes.stage_costs import cache_bytes as cache_bytes
    from private_llm.token_sharding.nodes.stage_costs import cards as cards
    from private_llm.token_sharding.nodes.stage_costs import comp_sizes as comp_sizes
    from private_llm.token_sharding.nodes.stage_costs import paper_bytes as paper_bytes
    from private_llm.token_sharding.nodes.stage_costs import paper_seconds as paper_seconds
    from private_llm.token_sharding.nodes.stage_costs import seconds_of as seconds_of
    from private_llm.token_sharding.nodes.stage_costs import shard_sizes as shard_sizes
    from private_llm.token_sharding.plans import ShardingPlan as ShardingPlan
    from private_llm.token_sharding.plans.audit import Setting as Setting
    from private_llm.token_sharding.plans.audit import audit as audit
    from private_llm.token_sharding.plans.audit import fewest as fewest
    from private_llm.token_sharding.plans.audit import refuse_weak as refuse_weak
    from private_llm.token_sharding.plans.audit import warn_weak as warn_weak
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
