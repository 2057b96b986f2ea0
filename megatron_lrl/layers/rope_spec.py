"""Rotary position embedding as a model's config.json states it: validated, standardised, computed by
transformers.

The frequency formulas are transformers' own (`ROPE_INIT_FUNCTIONS`, and the Llama module for the kind
`default`); this module only decides which fields may reach them. Both spellings of the settings are read:
`rope_parameters` (transformers 5) and `rope_scaling` + `rope_theta` (older).

Shapes: D = dimensions of a head that rotate; an inverse-frequency vector is [D/2].
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_lrl.errors import UserError

# kind -> (required, optional) fields beside `rope_type` and `rope_theta`. A field outside this table is
# refused: it would either be ignored (and the user believes it acts) or change the rotation in a way that is
# not implemented.
ROPE_FIELDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
        frozenset({"original_max_position_embeddings"}),
    ),
    "yarn": (
        frozenset({"factor"}),
        frozenset(
            {
                "original_max_position_embeddings",
                "attention_factor",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "truncate",
            }
        ),
    ),
}

# kind -> fields that published files have and transformers does not read. vLLM multiplies cos and sin with attn_factor
# (DeepSeek-R1-0528-Qwen3-8B), so it is named when a model is loaded.
UNREAD_FIELDS = {"yarn": frozenset({"attn_factor"})}


@dataclass(frozen=True)
class RopeSpec:
    """The effective rotary embedding of a model, on the first `rotary_dim` dimensions of each head.

    Attributes:
        kind: `default`, `linear`, `llama3` or `yarn`.
        theta: base of the frequencies.
        parameters: the fields of this kind (`ROPE_FIELDS`), defaults that depend on the model filled in.
        attention_factor: multiplies cos and sin (1.0 except for `yarn`).
        head_dim: width of a head, even.
        max_position_embeddings: as config.json states it; some formulas read it.
        rotary_dim: D, even: how many dimensions rotate; 0 stands for all and becomes head_dim.
        interleaved: dimension 2i pairs with 2i + 1; otherwise i pairs with i + D/2 ("rotate_half").
    """

    kind: str
    theta: float
    head_dim: int
    max_position_embeddings: int
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    attention_factor: float = 1.0
    rotary_dim: int = 0
    interleaved: bool = False

    def __post_init__(self) -> None:
        if not self.rotary_dim:
            object.__setattr__(self, "rotary_dim", self.head_dim)

    def inv_freq(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, float]:
        """Inverse frequencies [D/2] on the CPU and the factor on cos and sin.

        `float32` runs transformers' function as it is, so it is bit-equal to what transformers' model uses.
        `float64` runs the same function with float64 in place of float32. Other dtypes raise ValueError:
        positions times frequencies lose whole turns below float32.
        """
        return _compute(self, dtype)

    @property
    def max_positions(self) -> int:
        """Positions the model can address: config.json's number, stretched where the scaling says so."""
        stretched = self.max_position_embeddings
        if self.kind == "linear":
            stretched = int(self.max_position_embeddings * self.parameters["factor"])
        elif self.kind == "yarn":
            stretched = int(self.parameters["original_max_position_embeddings"] * self.parameters["factor"])
        return max(self.max_position_embeddings, stretched)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: what an identity, a hash or a manifest records."""
        return {
            "kind": self.kind,
            "theta": self.theta,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "parameters": dict(sorted(self.parameters.items())),
            "attention_factor": self.attention_factor,
            "rotary_dim": self.rotary_dim,
            "interleaved": self.interleaved,
        }


def read_rope(
    raw: Mapping[str, Any],
    *,
    head_dim: int,
    max_positions: int,
    theta: float,
    source: str,
    partial: float | None = None,
    interleaved: bool = False,
    mrope: bool = False,
) -> RopeSpec:
    """Read the rotary settings of a config.json.

    Args:
        raw: the whole config dictionary.
        head_dim, max_positions: the model's, already validated.
        theta: the family's default base, used when the file names none.
        source: the file, for messages.
        partial: the family's default share of the head that rotates; None: the family rotates whole heads.
        interleaved: which dimensions form a pair, see `RopeSpec`.
        mrope: the family has sections for image positions. On text they all hold the same position, so that the
            rotation is the plain one: the fields are accepted and have no effect.

    Raises:
        UserError: unsupported kind, unknown, missing, contradictory or ill-typed field, partial rotation in a
            family without.
    """
    key, given = _rope_section(raw, source)
    where = f"{source}: {key}"
    kind = _rope_kind(given, where)
    required, optional = ROPE_FIELDS[kind]

    parameters: dict[str, Any] = {}
    for name, value in given.items():
        if name in ("rope_type", "type", "rope_theta", "partial_rotary_factor") or value is None:
            continue
        if mrope and name in ("mrope_section", "mrope_interleaved"):
            continue
        if name in UNREAD_FIELDS.get(kind, ()):
            _number(value, f"{where}.{name}")
            continue
        if name not in required | optional:
            valid = ", ".join(sorted(required | optional | {"rope_type", "rope_theta"}))
            raise UserError(
                f"{where}.{name} = {value!r} is not a field of RoPE kind '{kind}'; valid: {valid}"
            )
        parameters[name] = _number(value, f"{where}.{name}", boolean=name == "truncate")
    if missing := sorted(required - parameters.keys()):
        raise UserError(f"{where}: RoPE kind '{kind}' needs the field(s) {', '.join(missing)}")
    if parameters.get("factor", 1.0) < 1.0:
        raise UserError(f"{where}.factor = {parameters['factor']!r} must be at least 1")
    if kind == "llama3" and parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
        raise UserError(f"{where}.high_freq_factor must be larger than low_freq_factor")

    rotary_dim = _rotary_dim(given, raw, head_dim, partial, where)
    _resolve_original_length(parameters, raw, kind, max_positions, source, where)

    spec = RopeSpec(
        kind=kind,
        theta=_rope_theta(given, raw, theta, source, where),
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        parameters=parameters,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
    )
    try:
        inv_freq, attention_factor = spec.inv_freq()
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise UserError(f"{where} cannot be evaluated ({error}): check theta and the factors") from error
    if not bool(torch.isfinite(inv_freq).all()) or not attention_factor > 0:
        raise UserError(f"{where} gives frequencies that are not finite: check theta and the factors")
    return RopeSpec(**{**vars(spec), "attention_factor": float(attention_factor)})


def unread_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary fields of a valid config.json that are there and have no effect."""
    _, given = _rope_section(raw, "config.json")
    return {name: given[name] for name in UNREAD_FIELDS.get(_rope_kind(given, ""), ()) if name in given}


def _rotary_dim(
    given: Mapping[str, Any], raw: Mapping[str, Any], head_dim: int, default: float | None, where: str
) -> int:
    """Dimensions that rotate: transformers' order is the section's own field, the top level's, the family's."""
    key = "partial_rotary_factor"
    stated = [section[key] for section in (given, raw) if section.get(key) is not None]
    if default is None:
        for value in stated:
            if value not in (1, 1.0):
                raise UserError(f"{where}: {key} = {value!r} is not supported; valid: 1.0")
        return head_dim
    factors = [float(_number(value, f"{where}: {key}")) for value in stated] or [default]
    if len(set(factors)) > 1:
        raise UserError(f"{where}.{key} = {factors[0]!r} contradicts {key} = {factors[1]!r} at the top level")
    rotary_dim = int(head_dim * factors[0])
    if not 0 < factors[0] <= 1 or rotary_dim < 2 or rotary_dim % 2:
        raise UserError(
            f"{where}: {key} = {factors[0]!r} must be at most 1 and give an even number of the "
            f"{head_dim} dimensions of a head, at least 2"
        )
    return rotary_dim


def _rope_section(raw: Mapping[str, Any], source: str) -> tuple[str, Mapping[str, Any]]:
    """The dictionary that holds the settings and its key; two that disagree are refused."""
    found = {k: raw[k] for k in ("rope_parameters", "rope_scaling") if raw.get(k)}
    for key, value in found.items():
        if not isinstance(value, dict):
            raise UserError(f"{source}: {key} must be an object, found {value!r}")
    if len(found) == 2:
        new, old = (dict(v) for v in found.values())
        for section in (new, old):
            if "type" in section:
                section.setdefault("rope_type", section.pop("type"))
            section.pop("rope_theta", None)
        if new != old:
            raise UserError(
                f"{source}: rope_parameters and rope_scaling contradict each other; keep one of them"
            )
    return next(iter(found.items()), ("rope_parameters", {}))


def _rope_kind(given: Mapping[str, Any], where: str) -> str:
    kinds = {given[k] for k in ("rope_type", "type") if isinstance(given.get(k), str)}
    if len(kinds) > 1:
        raise UserError(f"{where}: rope_type and type contradict each other: {', '.join(sorted(kinds))}")
    named = [k for k in ("rope_type", "type") if given.get(k) is not None]
    kind = kinds.pop() if kinds else ("default" if not named else repr(given[named[0]]))
    if kind not in ROPE_FIELDS:
        raise UserError(f"{where}.rope_type = {kind} is not supported; valid: {', '.join(ROPE_FIELDS)}")
    return kind


def _rope_theta(
    given: Mapping[str, Any], raw: Mapping[str, Any], default: float, source: str, where: str
) -> float:
    inner, outer = given.get("rope_theta"), raw.get("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        raise UserError(f"{where}.rope_theta = {inner!r} contradicts {source}: rope_theta = {outer!r}")
    stated = inner if inner is not None else outer
    theta = float(_number(default if stated is None else stated, f"{where}.rope_theta"))
    if theta <= 1.0:
        raise UserError(f"{where}.rope_theta = {theta!r} must be larger than 1")
    return theta


def _resolve_original_length(
    parameters: dict[str, Any], raw: Mapping[str, Any], kind: str, max_positions: int, source: str, where: str
) -> None:
    """Fill `original_max_position_embeddings` in transformers' order: inner, top-level, model's length."""
    name = "original_max_position_embeddings"
    outer = raw.get(name)
    if name not in ROPE_FIELDS[kind][1]:
        if outer is not None:
            raise UserError(f"{source}: {name} = {outer!r} has no meaning for RoPE kind '{kind}'")
        return
    inner = parameters.get(name)
    if inner is not None and outer is not None and inner != outer:
        raise UserError(f"{where}.{name} = {inner!r} contradicts {source}: {name} = {outer!r}")
    stated = inner if inner is not None else outer
    value = max_positions if stated is None else _number(stated, f"{where}.{name}")
    if value <= 0 or value != int(value):
        raise UserError(f"{where}.{name} = {value!r} must be a positive integer")
    parameters[name] = int(value)


def _number(value: Any, where: str, boolean: bool = False) -> Any:
    wanted = bool if boolean else (int, float)
    if not isinstance(value, wanted) or (isinstance(value, bool) and not boolean):
        raise UserError(f"{where} = {value!r} must be {'true or false' if boolean else 'a number'}")
    if not -1e300 < value < 1e300:  # JSON as Python reads it knows Infinity and NaN
        raise UserError(f"{where} = {value!r} must be a finite number")
    return value


class _Float64Torch:
    """`torch` with its float32 names meaning float64, for functions that spell the dtype out."""

    float = torch.float64
    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _compute(spec: RopeSpec, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"inverse frequencies are computed in float32 or float64, not {dtype}")
    function: Callable[..., tuple[torch.Tensor, float]] = (
        LlamaRotaryEmbedding.compute_default_rope_parameters
        if spec.kind == "default"
        else ROPE_INIT_FUNCTIONS[spec.kind]
    )
    if dtype == torch.float64:
        # The functions name float32 explicitly, so the default dtype cannot steer them: run the same code
        # object with another `torch` in its globals (nested functions inherit them).
        assert isinstance(function, types.FunctionType)
        scope = {**function.__globals__, "torch": _Float64Torch()}
        function = types.FunctionType(
            function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
        )
    # Only head_dim, the positions and the rotary fields are read by these functions; the family does not
    # matter, and the head's width only as the number of dimensions that rotate.
    config = LlamaConfig(
        hidden_size=spec.rotary_dim,
        num_attention_heads=1,
        head_dim=spec.rotary_dim,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters={"rope_type": spec.kind, "rope_theta": spec.theta, **spec.parameters},
    )
    with torch.device("cpu"):
        inv_freq, attention_factor = function(config, device=torch.device("cpu"))
    return inv_freq.detach(), float(attention_factor)
