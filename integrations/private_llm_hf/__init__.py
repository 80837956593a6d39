"""HuggingFace models on secret-shared data: `AutoPrivate*.from_pretrained` and `patch`."""

from private_llm.importing import without_collections

with without_collections():
    from private_llm.config import PrivateConfig, TLSConfig
    from private_llm.kv_policies.fixed import KeepAll, NoCache, SlidingWindow
    from private_llm.kv_policies.mpcache import MPCacheConfig
    from private_llm.kv_policies.policy import Level
    from private_llm.kv_policies.rivals import H2O, TOVA, HeadMerging, InfLLM, LongCache, SnapKV
    from private_llm.ranges import Ranges
    from private_llm.sparsity_config import CometConfig
    from private_llm.token_sharding import ShardingPlan
    from private_llm_hf.api import (
        AutoPrivateModel,
        AutoPrivateModelForCausalLM,
        AutoPrivateModelForImageClassification,
        AutoPrivateModelForMaskedLM,
        AutoPrivateModelForQuestionAnswering,
        AutoPrivateModelForSeq2SeqLM,
        AutoPrivateModelForSequenceClassification,
        AutoPrivateModelForTokenClassification,
        patch,
        ranges_of_checkpoint,
        share_checkpoint,
    )
    from private_llm_hf.client.preprocess import ForwardPlan, GeneratePlan
    from private_llm_hf.client.speculation import FixedCounts, SpeculationConfig
    from private_llm_hf.handlers import register_handler, unregister_handler
    from private_llm_hf.transformers_versions import warn_if_untested
    from private_llm_hf.vision.network import Network

warn_if_untested()

__all__ = [
    "H2O",
    "TOVA",
    "AutoPrivateModel",
    "AutoPrivateModelForCausalLM",
    "AutoPrivateModelForImageClassification",
    "AutoPrivateModelForMaskedLM",
    "AutoPrivateModelForQuestionAnswering",
    "AutoPrivateModelForSeq2SeqLM",
    "AutoPrivateModelForSequenceClassification",
    "AutoPrivateModelForTokenClassification",
    "CometConfig",
    "FixedCounts",
    "ForwardPlan",
    "GeneratePlan",
    "HeadMerging",
    "InfLLM",
    "KeepAll",
    "Level",
    "LongCache",
    "MPCacheConfig",
    "Network",
    "NoCache",
    "PrivateConfig",
    "Ranges",
    "ShardingPlan",
    "SlidingWindow",
    "SnapKV",
    "SpeculationConfig",
    "TLSConfig",
    "patch",
    "ranges_of_checkpoint",
    "register_handler",
    "share_checkpoint",
    "unregister_handler",
]
