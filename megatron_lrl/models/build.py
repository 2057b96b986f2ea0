"""Architecture -> Megatron-Core `TransformerConfig`, layer spec and `GPTModel`.

The local spec runs everywhere; the Transformer Engine spec is taken when it is installed and a GPU is
present. Both get `SegmentCoreAttention` as core attention.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F

from megatron_lrl import platform_cpu
from megatron_lrl.errors import UserError
from megatron_lrl.models.hf_config import Architecture
from megatron_lrl.models.layout_check import check_layout
from megatron_lrl.runtime import Layout, Runtime

platform_cpu.install()

from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_submodules,
)
from megatron.core.tensor_parallel.layers import RowParallelLinear  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_lrl.attention.core import LastKVCoreAttention, SegmentCoreAttention  # noqa: E402
from megatron_lrl.models.layer import PolicyLayer  # noqa: E402
from megatron_lrl.models.norm import RMSNorm  # noqa: E402
from megatron_lrl.models.rotary import PositionRotaryEmbedding  # noqa: E402


class RowParallelLinearWithBias(RowParallelLinear):
    """The attention output projection of models that bias it while their MLP has no biases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "bias": True})


def use_transformer_engine() -> bool:
    """True where Transformer Engine is installed and a GPU is present (its modules need one)."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def transformer_config(
    arch: Architecture, layout: Layout, dtype: torch.dtype, sequence_parallel: bool | None = None
) -> TransformerConfig:
    """Megatron-Core's configuration of this architecture in this layout."""
    check_layout(arch, layout)
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        qk_layernorm=arch.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        sequence_parallel=layout.tp > 1 if sequence_parallel is None else sequence_parallel and layout.tp > 1,
        # The loss arrives as a plain sum with final weights: no scaling by micro-batches or cp.
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        perform_initialization=False,
        use_cpu_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def layer_spec(arch: Architecture, transformer_engine: bool) -> TransformerBlockSubmodules | ModuleSpec:
    """One transformer layer with `SegmentCoreAttention`, on local or Transformer Engine modules."""
    if transformer_engine:
        submodules = get_gpt_layer_with_transformer_engine_submodules(qk_layernorm=arch.qk_norm)
    else:
        submodules = get_gpt_layer_local_submodules(qk_layernorm=arch.qk_norm, normalization="RMSNorm")
        submodules.input_layernorm = submodules.pre_mlp_layernorm = RMSNorm
        if arch.qk_norm:
            attention = submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        if arch.attention_output_bias:
            submodules.self_attention.submodules.linear_proj = RowParallelLinearWithBias
    submodules.self_attention.submodules.core_attention = (
        SegmentCoreAttention if arch.lastkv is None else LastKVCoreAttention
    )
    return ModuleSpec(module=PolicyLayer, submodules=submodules)


class PolicyModel(GPTModel):
    """`GPTModel` with RoPE at explicit positions; it runs through `megatron_lrl.state.advance`."""

    def __init__(
        self,
        arch: Architecture,
        config: TransformerConfig,
        pre_process: bool,
        post_process: bool,
        pg_collection: Any,
        device: torch.device,
    ) -> None:
        transformer_engine = use_transformer_engine() and device.type == "cuda"
        spec = layer_spec(arch, transformer_engine)
        if not transformer_engine:
            per_stage = arch.num_layers // config.pipeline_model_parallel_size
            spec = TransformerBlockSubmodules(layer_specs=[spec] * per_stage, layer_norm=RMSNorm)
        super().__init__(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=arch.padded_vocab_size(config.tensor_model_parallel_size),
            max_sequence_length=arch.max_positions,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="none",
            pg_collection=pg_collection,
        )
        self.arch = arch
        self.position_embedding_type = "rope"
        self.rotary_pos_emb = PositionRotaryEmbedding(arch.rope, config.params_dtype, device)
        for layer in self.decoder.layers:
            # Megatron-Core's name for the factor on cos and sin; it would derive its own from YaRN settings.
            layer.self_attention._yarn_concentration_factor = arch.rope.attention_factor


def build_model(
    arch: Architecture,
    runtime: Runtime,
    dtype: torch.dtype,
    sequence_parallel: bool | None = None,
) -> PolicyModel:
    """This rank's stage of the model, uninitialised parameters of ``dtype`` on the runtime's device.

    ``sequence_parallel``: None turns it on whenever tp > 1. Raises `UserError` if the layout does not fit the
    model.
    """
    if arch.attention_output_bias and use_transformer_engine():
        raise UserError(
            "attention_bias = true: a bias on the attention output projection is not supported with "
            "Transformer Engine"
        )
    config = transformer_config(arch, runtime.layout, dtype, sequence_parallel)
    model = PolicyModel(
        arch,
        config,
        pre_process=runtime.is_first_stage,
        post_process=runtime.is_last_stage,
        pg_collection=runtime.groups,
        device=runtime.device,
    )
    placed = all(tensor.device == runtime.device for tensor in (*model.parameters(), *model.buffers()))
    return model if placed else model.to(runtime.device)  # a planned model's (fake) parameters cannot be moved
