"""The one door to what transformers keeps private.

Every name of transformers that is not part of its public interface is imported or named here, so that an
upgrade that moves one breaks ``tests/model/test_private_imports.py`` instead of a user's run.
"""

from __future__ import annotations

import gc
import os
from typing import Any, TypeAlias

# A fifth of the time that the import of so much code takes is the search for garbage in it.
_collects = gc.isenabled()
gc.disable()
try:
    from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel, logging
    from transformers.cache_utils import (
        CacheLayerMixin,
        DummyLayer,
        DynamicIndexedLayer,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        LinearAttentionCacheLayerMixin,
        StaticLayer,
    )
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        Chunk,
        Concatenate,
        Interleave,
        MergeModulelist,
        Transpose,
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
    )
finally:
    if _collects:
        gc.enable()

__all__ = [
    "ALL_ATTENTION_FUNCTIONS",
    "ALL_MASK_ATTENTION_FUNCTIONS",
    "CONFIG_MAPPING",
    "CONFIG_MAPPING_NAMES",
    "CONVERTER_ATTRIBUTES",
    "EXPERT_FLAGS",
    "MODEL_ATTRIBUTES",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "Cache",
    "CacheLayerMixin",
    "Chunk",
    "Concatenate",
    "Config",
    "DummyLayer",
    "DynamicCache",
    "DynamicIndexedLayer",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "GradientCheckpointingLayer",
    "Interleave",
    "LinearAttentionCacheLayerMixin",
    "MergeModulelist",
    "PreTrainedConfig",
    "PreTrainedModel",
    "StaticLayer",
    "Transpose",
    "WeightConverter",
    "WeightRenaming",
    "dot_natural_key",
    "get_model_conversion_mapping",
    "rename_source_key",
]

# transformers is not typed for us; the alias says what is meant.
Config: TypeAlias = Any

# Members of PreTrainedModel that the package relies on.
MODEL_ATTRIBUTES = (
    "_from_config",
    "_get_dtype_plan",
    "_init_weights",
    "_initialize_weights",
    "_keep_in_fp32_modules",
    "_keep_in_fp32_modules_strict",
    "_keys_to_ignore_on_load_missing",
    "_keys_to_ignore_on_load_unexpected",
    "_tied_weights_keys",
    "base_model_prefix",
    "config_class",
    "get_decoder",
    "get_output_embeddings",
    "initialize_weights",
    "named_non_persistent_buffers",
)

# Attributes that transformers' decorator of experts classes sets on an instance.
EXPERT_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")

CONVERTER_ATTRIBUTES = ("source_patterns", "target_patterns", "operations", "convert", "add_tensor")


def quiet() -> None:
    """Keep transformers' advice about kernels and formats from a user's terminal; its errors still come."""
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()
