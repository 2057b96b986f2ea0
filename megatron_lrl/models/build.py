"""Architecture -> Megatron-Core `TransformerConfig`, layer spec and `GPTModel`.

The local spec runs everywhere; the Transformer Engine spec is taken when it is installed and a GPU is
present. In both, layer kinds put their token mixers in place.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F

from megatron_lrl import platform_cpu
from megatron_lrl.errors import UserError
from megatron_lrl.layers.architecture import Architecture
from megatron_lrl.layers.kinds import KINDS, kinds_of
from megatron_lrl.layers.moe import kind as moe
from megatron_lrl.models.layout_check import check_layout
from megatron_lrl.models.same_bits import keep_same_bits, wants_same_bits
from megatron_lrl.precision import Precision
from megatron_lrl.runtime import Layout, Runtime
from megatron_lrl.settings import Config

platform_cpu.install()

from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_submodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_lrl.layers.rotary import PositionRotaryEmbedding  # noqa: E402
from megatron_lrl.models.layer import PolicyLayer  # noqa: E402
from megatron_lrl.models.norm import RMSNorm  # noqa: E402


def use_transformer_engine() -> bool:
    """True where Transformer Engine is installed and a GPU is present (its modules need one)."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def transformer_config(
    arch: Architecture,
    layout: Layout,
    precision: Precision,
    sequence_parallel: bool | None = None,
    transformer_engine: bool | None = None,
) -> TransformerConfig:
    """Megatron-Core's configuration of this architecture in this layout; `transformer_engine`: whose modules."""
    grouped = use_transformer_engine() if transformer_engine is None else transformer_engine
    check_layout(arch, layout)
    if arch.moe is not None and layout.tp > 1 and sequence_parallel is False:
        raise UserError(
            f"parallel.sequence_parallel = false: with experts and parallel.tp = {layout.tp} each tp rank routes "
            "its own tokens; valid: true"
        )
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
        layernorm_zero_centered_gamma=arch.zero_centered_norm,
        qk_layernorm=arch.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        attention_output_gate=arch.output_gate,
        rotary_interleaved=arch.rope.interleaved,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **precision.settings(),
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
        **moe.settings(arch, layout, grouped),
        **{key: value for kind in kinds_of(arch) for key, value in kind.settings(arch).items()},
    )


def layer_spec(arch: Architecture, transformer_engine: bool, layer: int = 0) -> ModuleSpec:
    """Transformer layer ``layer`` (0-based, of the whole model), on local or Transformer Engine modules.

    Its kind puts its token mixer in place; expert layers get `PolicyRouter`.
    """
    sparse, kind = arch.moe_layers[layer], KINDS[arch.mixers[layer]]
    experts = arch.moe.num_experts if sparse and arch.moe is not None else None
    norm: Any
    if transformer_engine:
        norm = TESpecProvider().layer_norm()
        submodules = get_gpt_layer_with_transformer_engine_submodules(
            num_experts=experts, moe_grouped_gemm=sparse, qk_layernorm=arch.qk_norm
        )
    else:
        norm = RMSNorm
        submodules = get_gpt_layer_local_submodules(
            num_experts=experts, qk_layernorm=arch.qk_norm, normalization="RMSNorm"
        )
        submodules.input_layernorm = submodules.pre_mlp_layernorm = norm
        submodules.sharded_state_dict_keys_map = _fused_norm_names(sparse, kind.fused_norm)
    kind.install(submodules, arch, transformer_engine, norm)
    if sparse:
        assert arch.moe is not None
        moe.install(submodules, arch.moe)
    params = {"sandwich_norm": norm} if arch.sandwich_norms else {}
    return ModuleSpec(module=PolicyLayer, submodules=submodules, params=params)


def _fused_norm_names(sparse: bool, projection: str) -> dict[str, str]:
    """Names that distributed checkpoints give the local spec's norms: those of Transformer Engine's fused modules."""
    names = {"input_layernorm.": f"self_attention.{projection}.layer_norm_"} if projection else {}
    return names if sparse else {**names, "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def stage_spec(
    arch: Architecture, stages: int, stage: int, transformer_engine: bool
) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage and the final norm."""
    count = arch.num_layers // stages
    layers = [layer_spec(arch, transformer_engine, i) for i in range(stage * count, (stage + 1) * count)]
    # Passes without a head hand the final norm no rows, which Transformer Engine's kernels refuse.
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


class PolicyModel(GPTModel):
    """`GPTModel` with RoPE at explicit positions; it runs through `megatron_lrl.layers.advance`."""

    def __init__(
        self,
        arch: Architecture,
        config: TransformerConfig,
        pre_process: bool,
        post_process: bool,
        pg_collection: Any,
        device: torch.device,
        transformer_engine: bool,
    ) -> None:
        # Transformer Engine has no float64.
        wide = config.params_dtype == torch.float64
        transformer_engine = transformer_engine and device.type == "cuda" and not wide
        spec = stage_spec(
            arch, config.pipeline_model_parallel_size, pg_collection.pp.rank(), transformer_engine
        )
        super().__init__(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=arch.padded_vocab_size(config.tensor_model_parallel_size),
            max_sequence_length=arch.positions,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="none",
            pg_collection=pg_collection,
        )
        self.arch = arch
        self.same_bits = False
        """Whether a token's forward must give the same bits in any company; see `layers.softmax.invariant`."""
        self.adapters: Any = None
        """What is trained where the weights are frozen: `adapters.adapt.Adapters`."""
        self.position_embedding_type = "rope"
        self.rotary_pos_emb = PositionRotaryEmbedding(arch.rope, config.params_dtype, device)


def build_model(
    arch: Architecture,
    runtime: Runtime,
    precision: Precision,
    sequence_parallel: bool | None = None,
    plain: bool = False,
) -> PolicyModel:
    """This rank's stage of the model, uninitialised parameters on the runtime's device.

    ``sequence_parallel``: None turns it on whenever tp > 1. ``plain``: of Megatron-Core's own modules, also where
    Transformer Engine is. Raises `UserError` if the layout does not fit the model.
    """
    transformer_engine = use_transformer_engine() and not plain
    if arch.attention_output_bias and transformer_engine:
        raise UserError(
            "attention_bias = true: a bias on the attention output projection is not supported with "
            "Transformer Engine"
        )
    config = transformer_config(arch, runtime.layout, precision, sequence_parallel, transformer_engine)
    model = PolicyModel(
        arch,
        config,
        pre_process=runtime.is_first_stage,
        post_process=runtime.is_last_stage,
        pg_collection=runtime.groups,
        device=runtime.device,
        transformer_engine=transformer_engine,
    )
    placed = all(tensor.device == runtime.device for tensor in (*model.parameters(), *model.buffers()))
    return (
        model if placed else model.to(runtime.device)
    )  # a planned model's (fake) parameters cannot be moved


def configured_model(config: Config, arch: Architecture, runtime: Runtime) -> PolicyModel:
    """`build_model` with a run's dtypes, sequence parallelism and `same_bits`; plain under adapters."""
    sequence_parallel = config.parallel.sequence_parallel
    model = build_model(arch, runtime, Precision.of(config), sequence_parallel, plain=config.adapter.on)
    if wants_same_bits(config, arch, runtime.layout, runtime.device):
        keep_same_bits(model, True)
    return model
