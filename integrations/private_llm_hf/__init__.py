"""HuggingFace models on secret-shared data: `AutoPrivate*.from_pretrained` and `patch`.

A name is imported when somebody first asks for it, as transformers does it: most need PyTorch and transformers.
"""

from typing import TYPE_CHECKING

from private_llm.importing import lazy_names
from private_llm_hf.transformers_versions import warn_if_untested

if TYPE_CHECKING:
    from private_llm.config import PrivateConfig as PrivateConfig
    from private_llm.kv_cache.policies.papers import H2O as H2O
    from private_llm.kv_cache.policies.papers import TOVA as TOVA
    from private_llm.kv_cache.policies.papers import HeadMerging as HeadMerging
    from private_llm.kv_cache.policies.papers import InfLLM as InfLLM
    from private_llm.kv_cache.policies.papers import LongCache as LongCache
    from private_llm.kv_cache.policies.papers import MPCacheConfig as MPCacheConfig
    from private_llm.kv_cache.policies.papers import SnapKV as SnapKV
    from private_llm.kv_cache.policies.policy import KeepAll as KeepAll
    from private_llm.kv_cache.policies.policy import Level as Level
    from private_llm.kv_cache.policies.policy import NoCache as NoCache
    from private_llm.kv_cache.policies.policy import SlidingWindow as SlidingWindow
    from private_llm.ranges import Ranges as Ranges
    from private_llm.sparsity_config import CometConfig as CometConfig
    from private_llm.tls_config import TLSConfig as TLSConfig
    from private_llm.token_sharding import ShardingPlan as ShardingPlan
    from private_llm_hf.api import AutoPrivateModel as AutoPrivateModel
    from private_llm_hf.api import AutoPrivateModelForCausalLM as AutoPrivateModelForCausalLM
    from private_llm_hf.api import AutoPrivateModelForImageClassification as AutoPrivateModelForImageClassification
    from private_llm_hf.api import AutoPrivateModelForMaskedLM as AutoPrivateModelForMaskedLM
    from private_llm_hf.api import AutoPrivateModelForQuestionAnswering as AutoPrivateModelForQuestionAnswering
    from private_llm_hf.api import AutoPrivateModelForSeq2SeqLM as AutoPrivateModelForSeq2SeqLM
    from private_llm_hf.api import (
        AutoPrivateModelForSequenceClassification as AutoPrivateModelForSequenceClassification,
    )
    from private_llm_hf.api import AutoPrivateModelForTokenClassification as AutoPrivateModelForTokenClassification
    from private_llm_hf.api import patch as patch
    from private_llm_hf.api import prepare_corrections as prepare_corrections
    from private_llm_hf.api import ranges_of_checkpoint as ranges_of_checkpoint
    from private_llm_hf.api import share_checkpoint as share_checkpoint
    from private_llm_hf.client.party_groups import PartyGroups as PartyGroups
    from private_llm_hf.client.preprocess import ForwardPlan as ForwardPlan
    from private_llm_hf.client.preprocess import GeneratePlan as GeneratePlan
    from private_llm_hf.client.speculation import FixedCounts as FixedCounts
    from private_llm_hf.client.speculation import SpeculationConfig as SpeculationConfig
    from private_llm_hf.models.handlers import register_handler as register_handler
    from private_llm_hf.models.handlers import unregister_handler as unregister_handler
    from private_llm_hf.vision.network import Network as Network
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)

warn_if_untested()
