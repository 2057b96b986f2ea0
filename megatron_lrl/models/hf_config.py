"""Hugging Face config.json -> `Architecture`: everything the model builder, the tables and the identity need.

The file is read as plain JSON; no code of the checkpoint runs. A field that would change the computation and
is not implemented is refused by name, so a model that loads computes what transformers computes.

Symbols: L layers, H hidden size, F feed-forward size, N query heads, M key-value heads, D head_dim, V
vocabulary.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_lrl.errors import UserError
from megatron_lrl.models.rope_spec import RopeSpec, read_rope

__all__ = [
    "Architecture",
    "LastKVSpec",
    "RopeSpec",
    "architecture_from_dict",
    "describe_rope",
    "read_architecture",
]

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Fields without influence on logits: bookkeeping, tokenizer ids, initialisation, generation defaults, output
# flags.
_INERT = frozenset(
    """
    architectures model_type transformers_version transformers.js_config torch_dtype dtype use_cache
    initializer_range pad_token_id bos_token_id eos_token_id sep_token_id decoder_start_token_id id2label
    label2id problem_type finetuning_task task_specific_params tokenizer_class prefix output_hidden_states
    output_attentions return_dict return_dict_in_generate output_scores torchscript chunk_size_feed_forward
    is_decoder is_llama_config unsloth_fixed unsloth_version max_window_layers use_bfloat16 tf_legacy_loss
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature
    top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens max_new_tokens
    """.split()  # noqa: SIM905
)
# Fields this reader interprets.
_READ = frozenset(
    """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    head_dim hidden_act max_position_embeddings rms_norm_eps tie_word_embeddings attention_bias layer_types
    use_sliding_window sliding_window rope_parameters rope_scaling rope_theta partial_rotary_factor
    original_max_position_embeddings lastkv """.split()  # noqa: SIM905
)
# Known fields with the only values that are implemented.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "hidden_activation": ("silu",),
    "mlp_bias": (False,),
    "attention_dropout": (0, 0.0),
    "pretraining_tp": (1,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "is_causal": (True,),
    "tie_encoder_decoder": (False,),
    "cross_attention_hidden_size": (),
    "quantization_config": (),
    "pruned_heads": ({},),
    "auto_map": (),
}


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
class Architecture:
    """A dense decoder of the families `llama`, `qwen2`, `qwen3`, as its config.json defines it.

    `raw` is the config as read; it travels along for export and is no part of equality or of the fingerprint.
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
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def heads_per_group(self) -> int:
        """Query heads per key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention(self) -> str:
        """Attention kind with the LastKV boundaries, for identities and logs: "full", "lastkv C=512 blend"."""
        return "full" if self.lastkv is None else str(self.lastkv)

    def with_lastkv(self, lastkv: LastKVSpec | None) -> Architecture:
        """The same model with LastKV attention, or (None) without; `raw` says so too."""
        raw = {key: value for key, value in self.raw.items() if key != "lastkv"}
        declared = {} if lastkv is None else {"lastkv": lastkv.to_dict()}
        return replace(self, lastkv=lastkv, raw={**raw, **declared})

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of embedding and output layer over all tp ranks: V rounded up to a multiple of tp."""
        return -(-self.vocab_size // tp) * tp

    def to_dict(self) -> dict[str, Any]:
        """Plain values of every field that defines the computation or a tensor's shape (all but `raw`)."""
        plain = {k: v for k, v in vars(self).items() if k not in ("raw", "rope", "lastkv")}
        lastkv = {} if self.lastkv is None else {"lastkv": self.lastkv.to_dict()}
        return {**plain, "rope": self.rope.to_dict(), **lastkv}

    def fingerprint(self) -> str:
        """sha256 over `to_dict()`: two checkpoints with different fingerprints are different models."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()


def read_architecture(hf_dir: str | Path) -> Architecture:
    """Read `hf_dir/config.json`.

    Raises:
        UserError: no such directory or file, malformed JSON, unsupported family, or a field that is missing,
            ill-typed, or changes the computation in a way that is not implemented.
    """
    directory = Path(hf_dir)
    path = directory / "config.json"
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; expected a Hugging Face model directory")
    if not path.is_file():
        raise UserError(f"{path}: no such file; a Hugging Face model directory holds a config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return architecture_from_dict(raw, source=str(path))


def architecture_from_dict(raw: Mapping[str, Any], source: str = "config.json") -> Architecture:
    """As `read_architecture`, from a config dictionary; `source` is the file named in messages."""
    family = _family(raw, source)
    defaults = _family_defaults(family)
    _refuse_unsupported(raw, source)

    num_layers = _integer(raw, "num_hidden_layers", source)
    hidden = _integer(raw, "hidden_size", source)
    num_heads = _integer(raw, "num_attention_heads", source)
    num_kv_heads = num_heads
    if raw.get("num_key_value_heads", defaults["num_key_value_heads"]) is not None:
        num_kv_heads = _integer(raw, "num_key_value_heads", source, defaults["num_key_value_heads"])
    if num_heads % num_kv_heads:
        raise UserError(
            f"{source}: num_attention_heads = {num_heads} is not a multiple of "
            f"num_key_value_heads = {num_kv_heads}"
        )
    if raw.get("head_dim", defaults.get("head_dim")) is not None:
        head_dim = _integer(raw, "head_dim", source, defaults.get("head_dim"))
    elif hidden % num_heads == 0:
        head_dim = hidden // num_heads
    else:
        raise UserError(
            f"{source}: hidden_size = {hidden} is not a multiple of num_attention_heads = {num_heads}"
        )
    if head_dim % 2:
        raise UserError(f"{source}: head_dim = {head_dim} must be even (rotary embedding)")
    _refuse_sliding_window(raw, family, num_layers, defaults, source)

    norm_eps = raw.get("rms_norm_eps", defaults["rms_norm_eps"])
    if isinstance(norm_eps, bool) or not isinstance(norm_eps, int | float) or not 0 < norm_eps < 1:
        raise UserError(f"{source}: rms_norm_eps = {norm_eps!r} must be a number between 0 and 1")
    attention_bias = _boolean(raw, "attention_bias", source, False)
    if family == "qwen2" and "attention_bias" in raw and not attention_bias:
        # transformers' Qwen2 has biases whatever the field says
        raise UserError(
            f"{source}: attention_bias = false contradicts family qwen2, which always has q, k, v biases"
        )
    rope = read_rope(
        raw,
        head_dim=head_dim,
        max_positions=_integer(raw, "max_position_embeddings", source, defaults["max_position_embeddings"]),
        theta=defaults["rope_theta"],
        source=source,
    )
    return Architecture(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_hidden_size=_integer(raw, "intermediate_size", source),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_integer(raw, "vocab_size", source),
        norm_eps=float(norm_eps),
        tied=_boolean(raw, "tie_word_embeddings", source, defaults["tie_word_embeddings"]),
        qkv_bias=attention_bias or family == "qwen2",
        attention_output_bias=attention_bias and family != "qwen2",
        qk_norm=family == "qwen3",
        max_positions=rope.max_positions,
        activation="silu",
        rope=rope,
        lastkv=_lastkv(raw, source),
        raw=dict(raw),
    )


def describe_rope(arch: Architecture) -> str:
    """One line with the effective rotary embedding, printed when a model is loaded."""
    rope = arch.rope
    inv_freq, factor = rope.inv_freq()
    fields = "".join(f", {name}={value}" for name, value in sorted(rope.parameters.items()))
    return (
        f"RoPE {rope.kind}: theta={rope.theta:g}{fields}, head_dim={rope.head_dim}, "
        f"positions={rope.max_positions}, cos/sin factor={factor:.6g}, "
        f"frequencies {float(inv_freq[0]):.6g} .. {float(inv_freq[-1]):.6g}"
    )


def _family(raw: Mapping[str, Any], source: str) -> str:
    valid = ", ".join(FAMILIES)
    model_type, classes = raw.get("model_type"), raw.get("architectures") or []
    if not isinstance(classes, list):
        raise UserError(f"{source}: architectures = {classes!r} must be a list of class names")
    if model_type is None:
        named = [family for family, name in FAMILIES.items() if name in classes]
        if not named:
            raise UserError(
                f"{source}: neither model_type nor architectures names a supported family ({valid})"
            )
        model_type = named[0]
    if model_type not in FAMILIES:
        raise UserError(f"{source}: model_type = {model_type!r} is not supported; valid: {valid}")
    if classes and classes != [FAMILIES[model_type]]:
        raise UserError(
            f"{source}: architectures = {classes!r} does not fit model_type {model_type!r}; "
            f"valid: [{FAMILIES[model_type]!r}]"
        )
    return model_type


def _family_defaults(family: str) -> dict[str, Any]:
    """transformers' defaults for fields the file leaves out."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    config_class: Any = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[family]
    names = (
        "num_key_value_heads head_dim rms_norm_eps tie_word_embeddings max_position_embeddings sliding_window"
    )
    defaults = {name: getattr(config_class, name, None) for name in [*names.split(), "max_window_layers"]}
    # Llama computes head_dim from the other sizes when it is absent; Qwen2 has no such field of its own.
    return {**defaults, "rope_theta": float(config_class.default_theta)}


def _refuse_unsupported(raw: Mapping[str, Any], source: str) -> None:
    for key, value in raw.items():
        if key in _FIXED:
            allowed = _FIXED[key]
            if value is None and key not in ("hidden_act", "hidden_activation"):
                continue
            if not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed):
                valid = " or ".join(json.dumps(a) for a in allowed[:1]) or "null"
                raise UserError(f"{source}: {key} = {value!r} is not supported; valid: {valid}")
        elif key in _INERT or key in _READ or key.startswith("_"):
            continue
        elif value is not None and value is not False:
            # A field unknown here may scale logits, change masks, add modules; transformers' own class for
            # this family would not know it either. Null and false mean "off".
            raise UserError(
                f"{source}: {key} = {value!r} is an unknown field and might change the computation; "
                "remove it if it has no effect on this model"
            )


def _refuse_sliding_window(
    raw: Mapping[str, Any], family: str, num_layers: int, defaults: Mapping[str, Any], source: str
) -> None:
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list) or len(layer_types) != num_layers:
            raise UserError(f"{source}: layer_types must list one kind per layer ({num_layers})")
        for index, kind in enumerate(layer_types):
            if kind != "full_attention":
                raise UserError(
                    f"{source}: layer_types[{index}] = {kind!r} is not supported; valid: 'full_attention'"
                )
    window = raw.get("sliding_window", defaults["sliding_window"])
    if family == "llama":
        if window is not None:
            raise UserError(f"{source}: sliding_window = {window!r} is not supported; valid: null")
        if raw.get("use_sliding_window") not in (None, False):
            raise UserError(f"{source}: use_sliding_window = true is not supported; valid: false")
        return
    first_windowed = raw.get("max_window_layers", defaults["max_window_layers"])
    enabled = (
        _boolean(raw, "use_sliding_window", source, False) and window is not None and layer_types is None
    )
    if enabled and not (isinstance(first_windowed, int) and first_windowed >= num_layers):
        raise UserError(
            f"{source}: use_sliding_window = true with max_window_layers = {first_windowed!r} puts a sliding "
            f"window on some of the {num_layers} layers, which is not supported; "
            "valid: use_sliding_window = false"
        )


def _lastkv(raw: Mapping[str, Any], source: str) -> LastKVSpec | None:
    """The key `lastkv`; null and absent mean full attention."""
    value = raw.get("lastkv")
    if value is None:
        return None
    valid = 'valid: {"chunk_size": 512, "blend": true}'
    if not isinstance(value, dict):
        raise UserError(f"{source}: lastkv = {value!r} must be an object; {valid}")
    if unknown := sorted(value.keys() - {"chunk_size", "blend"}):
        raise UserError(f"{source}: lastkv.{unknown[0]} is an unknown field; {valid}")
    chunk_size, blend = value.get("chunk_size"), value.get("blend")
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise UserError(f"{source}: lastkv.chunk_size = {chunk_size!r} must be a positive integer; {valid}")
    if not isinstance(blend, bool):
        raise UserError(f"{source}: lastkv.blend = {blend!r} must be true or false; {valid}")
    return LastKVSpec(chunk_size, blend)


def _integer(raw: Mapping[str, Any], key: str, source: str, default: int | None = None) -> int:
    value = raw.get(key, default)
    if key not in raw and default is None:
        raise UserError(f"{source}: the field {key} is missing; expected a positive integer")
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise UserError(f"{source}: {key} = {value!r} must be a positive integer")
    return value


def _boolean(raw: Mapping[str, Any], key: str, source: str, default: bool) -> bool:
    value = raw.get(key, default)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise UserError(f"{source}: {key} = {value!r} must be true or false")
    return value
