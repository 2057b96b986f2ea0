"""Hugging Face config.json -> `Architecture`.

The file is read as plain JSON; no code of the checkpoint runs. A field that would change the computation and
is not implemented is refused by name, so a model that loads computes what transformers computes. What each family
does with its fields stands in `hf_families`, which fields are known in `hf_fields`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lrl.errors import UserError
from megatron_lrl.layers.architecture import ATTENTION, Architecture, LastKVSpec, MoESpec
from megatron_lrl.layers.mla.sizes import MLA, MLASpec
from megatron_lrl.layers.rope_spec import RopeSpec, read_rope, unread_fields
from megatron_lrl.models.hf_families import (
    FAMILIES,
    MROPE,
    PARTIAL_ROTARY,
    default_of,
    family_fields,
    find_family,
)
from megatron_lrl.models.hf_fields import (
    MOST_LAYERS,
    boolean,
    integer,
    number,
    refuse_contradictions,
    refuse_quantization,
    refuse_sliding_window,
    refuse_unsupported,
)
from megatron_lrl.models.hf_files import refuse_adapters, refuse_code
from megatron_lrl.preflight import require_model
from megatron_lrl.reading import read_object

__all__ = [
    "ATTENTION",
    "FAMILIES",
    "Architecture",
    "LastKVSpec",
    "MoESpec",
    "RopeSpec",
    "architecture_from_dict",
    "describe_rope",
    "read_architecture",
]


def read_architecture(hf_dir: str | Path) -> Architecture:
    """Read `hf_dir/config.json`.

    Raises:
        UserError: no such directory or file, malformed JSON, unsupported family, or a field that is missing,
            ill-typed, or changes the computation in a way that is not implemented; an adapter beside the weights, or
            code that `auto_map` names.
    """
    require_model(hf_dir)
    path = Path(hf_dir) / "config.json"
    arch = architecture_from_dict(read_object(path), source=str(path))
    refuse_adapters(path.parent)
    refuse_code(path.parent)
    return arch


def architecture_from_dict(raw: Mapping[str, Any], source: str = "config.json") -> Architecture:
    """As `read_architecture`, from a config dictionary; `source` is the file named in messages."""
    family = find_family(raw, source)
    lastkv = _lastkv(raw, source)
    refuse_quantization(raw, source)
    if not family.wrapper:
        return _decoder(raw, family.name, source, raw=dict(raw), lastkv=lastkv)
    refuse_unsupported(raw, family.name, source, wrapper=True)
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise UserError(f"{source}: text_config must be an object, the language model's configuration")
    inner = f"{source}: text_config"
    if find_family({"model_type": f"{family.name}_text", **text}, inner).name != family.name:
        raise UserError(f"{inner}.model_type = {text['model_type']!r}; valid: '{family.name}_text'")
    if text.get("lastkv") is not None:
        raise UserError(f"{inner}.lastkv must stand beside text_config, not inside")
    refuse_quantization(text, inner)
    # transformers ties by the outer field alone
    tied = boolean(raw, "tie_word_embeddings", source, False)
    if boolean(text, "tie_word_embeddings", inner, False) and not tied:
        outer = "= false" if raw.get("tie_word_embeddings") is False else "is absent, which means false"
        raise UserError(
            f"{inner}.tie_word_embeddings = true contradicts {source}: tie_word_embeddings {outer}; the outer one "
            "decides: set it to what is meant"
        )
    arch = _decoder({**text, "tie_word_embeddings": tied}, family.name, inner, raw=dict(raw), lastkv=lastkv)
    carried = (*arch.carried, r"model\.visual\..*")
    return Architecture(**{**vars(arch), "hf_prefix": "model.language_model.", "carried": carried})


def _decoder(
    fields: Mapping[str, Any], family: str, source: str, *, raw: dict[str, Any], lastkv: LastKVSpec | None
) -> Architecture:
    """The language model that `fields` define; `raw` is the whole config, kept for export."""
    refuse_unsupported(fields, family, source)

    def size(key: str) -> int:
        return integer(fields, key, source)

    num_layers = integer(fields, "num_hidden_layers", source, most=MOST_LAYERS)
    hidden, num_heads = size("hidden_size"), size("num_attention_heads")
    kv_default = default_of(family, "num_key_value_heads")
    num_kv_heads = num_heads
    if fields.get("num_key_value_heads", kv_default) is not None:
        num_kv_heads = integer(fields, "num_key_value_heads", source, kv_default)
    if num_heads % num_kv_heads:
        raise UserError(
            f"{source}: num_attention_heads = {num_heads} is not a multiple of "
            f"num_key_value_heads = {num_kv_heads}"
        )
    # Llama and the mixtures compute head_dim from the other sizes when it is absent
    head_default = default_of(family, "head_dim")
    particular = family_fields(fields, family, num_layers, source)
    latent: MLASpec | None = particular.get("sizes", {}).get(MLA)
    if latent is not None:
        head_dim = latent.query
        if lastkv is not None:
            raise UserError(f"{source}: lastkv: LastKV needs layers of softmax attention; valid: absent")
        if num_kv_heads != num_heads:
            raise UserError(
                f"{source}: num_key_value_heads = {num_kv_heads} means nothing in latent attention; valid: {num_heads}"
            )
    elif fields.get("head_dim", head_default) is not None:
        head_dim = integer(fields, "head_dim", source, head_default)
    elif hidden % num_heads == 0:
        head_dim = hidden // num_heads
    else:
        raise UserError(
            f"{source}: hidden_size = {hidden} is not a multiple of num_attention_heads = {num_heads}"
        )
    if head_dim % 2:
        raise UserError(f"{source}: head_dim = {head_dim} must be even (rotary embedding)")
    defaults = {name: default_of(family, name) for name in ("sliding_window", "max_window_layers")}
    refuse_sliding_window(fields, family, num_layers, defaults, source)
    rope = read_rope(
        fields,
        head_dim=head_dim if latent is None else latent.rotary,
        max_positions=integer(
            fields, "max_position_embeddings", source, default_of(family, "max_position_embeddings")
        ),
        theta=float(default_of(family, "default_theta")),
        source=source,
        partial=PARTIAL_ROTARY.get(family),
        interleaved=family == "glm4"
        or (latent is not None and boolean(fields, "rope_interleave", source, True)),
        mrope=family in MROPE,
    )
    all_mixtures = all(particular.get("moe_layers", (False,)))
    arch = Architecture(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden,
        # of no influence where every layer is a mixture, and then often absent
        ffn_hidden_size=particular["moe"].ffn_hidden_size if all_mixtures else size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=size("vocab_size"),
        norm_eps=number(fields, "rms_norm_eps", source, default_of(family, "rms_norm_eps"), 0.0, 1.0),
        tied=boolean(fields, "tie_word_embeddings", source, default_of(family, "tie_word_embeddings")),
        max_positions=rope.max_positions,
        activation="silu",
        rope=rope,
        lastkv=lastkv,
        raw=raw,
        **particular,
    )
    refuse_contradictions(fields, arch, source)
    return arch


def describe_rope(arch: Architecture) -> str:
    """One line with the effective rotary embedding, printed when a model is loaded."""
    rope = arch.rope
    inv_freq, factor = rope.inv_freq()
    fields = "".join(f", {name}={value}" for name, value in sorted(rope.parameters.items()))
    partial = "" if rope.rotary_dim == rope.head_dim else f" of which {rope.rotary_dim} rotate"
    pairs = ", neighbours paired" if rope.interleaved else ""
    stretched = (
        "" if arch.stretched is None else f" (this run: {arch.stretched}, beyond what it was trained for)"
    )
    unread = "".join(
        f"; {name}={value} has no effect in transformers, and none here"
        for name, value in unread_fields(arch.raw.get("text_config") or arch.raw).items()
    )
    return (
        f"RoPE {rope.kind}: theta={rope.theta:g}{fields}, head_dim={rope.head_dim}{partial}{pairs}, "
        f"positions={rope.max_positions}{stretched}, cos/sin factor={factor:.6g}, "
        f"frequencies {float(inv_freq[0]):.6g} .. {float(inv_freq[-1]):.6g}{unread}"
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
