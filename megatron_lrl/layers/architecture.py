"""What a config.json defines: `Architecture`, everything the model builder, the tables and the identity need.

Values only; `hf_config` reads them from a file.

Symbols: L layers, H hidden size, F feed-forward size, N query heads, M key-value heads, D head_dim, V
vocabulary, E experts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatron_lrl.errors import UserError
from megatron_lrl.layers.rope_spec import RopeSpec

__all__ = ["ATTENTION", "Architecture", "LastKVSpec", "MoESpec"]


@dataclass(frozen=True)
class LastKVSpec:
    """LastKV attention as a property of the model: chunk size in tokens, and whether the previous chunk is blended."""

    chunk_size: int
    blend: bool

    def to_dict(self) -> dict[str, Any]:
        """The value of the key `lastkv` in config.json."""
        return asdict(self)

    def __str__(self) -> str:
        return f"lastkv C={self.chunk_size}{' blend' if self.blend else ''}"


@dataclass(frozen=True)
class MoESpec:
    """A mixture-of-experts MLP: E routed experts of which a token takes top_k, and an optional shared expert.

    Attributes:
        score: "softmax" over all experts, or "sigmoid" of each.
        normalise: divide the chosen weights by their sum (a sigmoid's by sum + 1e-20).
        scale: factor on the chosen weights, after that.
        bias: an fp32 bias per expert is added to the scores for the choice alone, not to the weights.
        groups, top_groups: experts lie in `groups` equal groups; only those of the `top_groups` best groups (by the sum
            of their two best scores) can be chosen.
        shared_ffn_hidden_size: F of the shared expert, 0 without one.
        shared_gate: its output is multiplied with sigmoid of a learned projection of the input.
        wide_router: the router's weight is kept and applied in float32 under bf16.
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = False
    score: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    bias: bool = False
    groups: int = 1
    top_groups: int = 1
    wide_router: bool = False


ATTENTION = "attention"
"""Softmax attention in `Architecture.mixers`; other kinds of token mixer are named in their rooms."""


_APART = (
    "raw",
    "stretched",
    "rope",
    "lastkv",
    "moe",
    "sizes",
)  # of `to_dict`: left out, or plain in their own way


@dataclass(frozen=True)
class Architecture:
    """A decoder, as its config.json defines it.

    `raw` is the config as read; it travels along for export and is no part of equality or of the fingerprint.

    Attributes beyond the sizes:
        ffn_hidden_size: F of the dense MLPs; that of the experts where every layer is a mixture.
        mixers: for each layer the name of its kind (`layers.kinds`).
        sizes: by kind, the sizes of its layers where the fields here do not give them: a dataclass of its room.
        moe_layers: for each layer, whether its MLP is `moe`; the others are dense with `ffn_hidden_size`.
        output_gate: q_proj also makes a gate per head that multiplies attention's output as sigmoid.
        zero_centered_norm: norms multiply with 1 + weight (all but a recurrent layer's output norm).
        sandwich_norms: two more norms, on the attention's and on the MLP's output before they join the residual.
        fused_gate_up: the dense MLP's gate and up projections are stored as one tensor, gate first.
        hf_prefix: what the names of the decoder's tensors start with ("model." or "model.language_model.").
        carried: regular expressions (full match) of tensors that are stored and exported but are no part of the model
            (vision tower, multi-token-prediction layers).
        stretched: positions that a run allows beyond `max_positions`; like `raw` no part of what the model is.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    attention_output_bias: bool
    qk_norm: bool
    max_positions: int
    activation: str
    rope: RopeSpec
    lastkv: LastKVSpec | None = None
    mixers: tuple[str, ...] = ()
    moe_layers: tuple[bool, ...] = ()
    moe: MoESpec | None = None
    sizes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    output_gate: bool = False
    zero_centered_norm: bool = False
    sandwich_norms: bool = False
    fused_gate_up: bool = False
    hf_prefix: str = "model."
    carried: tuple[str, ...] = ()
    stretched: int | None = field(default=None, compare=False)
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.mixers:
            object.__setattr__(self, "mixers", (ATTENTION,) * self.num_layers)
        if not self.moe_layers:
            object.__setattr__(self, "moe_layers", (False,) * self.num_layers)
        if self.lastkv is not None and ATTENTION not in self.mixers:
            raise UserError(f"LastKV needs layers of softmax attention; a {self.family} model has none")

    @property
    def positions(self) -> int:
        """The most tokens of a sequence: the model's own, or what a run allows."""
        return self.stretched or self.max_positions

    @property
    def hybrid(self) -> bool:
        """Whether some layers are no softmax attention."""
        return set(self.mixers) != {ATTENTION}

    @property
    def last_attention_layer(self) -> int:
        """1-based number of the last attention layer, as Megatron-Core counts."""
        return max(i for i, mixer in enumerate(self.mixers, 1) if mixer == ATTENTION)

    def with_lastkv(self, lastkv: LastKVSpec | None) -> Architecture:
        """The same model with LastKV attention, or (None) without; `raw` says so too."""
        raw = {key: value for key, value in self.raw.items() if key != "lastkv"}
        declared = {} if lastkv is None else {"lastkv": lastkv.to_dict()}
        return replace(self, lastkv=lastkv, raw={**raw, **declared})

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of embedding and output layer over all tp ranks: V rounded up to a multiple of tp."""
        return -(-self.vocab_size // tp) * tp

    def to_dict(self) -> dict[str, Any]:
        """Plain values of every field that defines the computation or a tensor's shape."""
        plain = {k: v for k, v in vars(self).items() if k not in _APART}
        plain |= {k: list(v) for k, v in plain.items() if isinstance(v, tuple)}  # as JSON gives them back
        specs = {"lastkv": self.lastkv, "moe": self.moe, **self.sizes}
        parts = {name: asdict(spec) for name, spec in specs.items() if spec is not None}
        return {**plain, "rope": self.rope.to_dict(), **parts}

    def fingerprint(self) -> str:
        """sha256 over `to_dict()`: two checkpoints with different fingerprints are different models."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()
