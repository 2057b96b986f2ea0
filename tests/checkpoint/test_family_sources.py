"""Claim: FP8 weights in blocks come out as the bfloat16 values they stand for, at any tp, experts packed or not,
and every tensor that does not fit is one error that names it; tensors that travel with a model keep their bits.

Why the tests show it: directories are quantised by code that spreads scales over whole tensors, with sizes that are no
multiple of a block; loaded and exported weights are compared with those values bit by bit. Each fault is seeded into a
good directory. Not shown: FP8 files of published models.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint.family_sources import edit, quantise, same_bits, stored, write_source
from harness import World, run_world
from oracle.tiny_models import make_hf_dir

from megatron_lrl.checkpoint.publish import incomplete_path

ONE, FOUR = World(), World(tp=2, pp=2)
Tensors = dict[str, torch.Tensor]
_SMALL = (
    "norm",
    "bias",
    "A_log",
    "conv1d",
    "embed_tokens",
    "lm_head",
    "mlp.gate.",
    "shared_expert_gate",
    "in_proj_b",
)
_SIZES = {
    "hidden": 160,
    "intermediate": 272,
    "moe_intermediate_size": 144,
    "vocab": 67,
    "dtype": torch.bfloat16,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fp8")


@pytest.fixture(scope="module")
def quantised(root: Path) -> dict[str, tuple[Path, Tensors]]:
    """Two FP8 directories, and what their quantised tensors mean: experts one by one, and packed."""
    found = {}
    for name, family, packed in (("single", "qwen3_moe", False), ("packed", "qwen3_next", True)):
        path = make_hf_dir(root / name, family, 5, packed=packed, mtp=packed, layers=2, **_sizes(family))
        tensors = {n: t for n, (_, t) in stored(path).items()}
        names = [n for n, t in tensors.items() if t.dim() > 1 and not any(part in n for part in _SMALL)]
        meant = quantise(path, sorted(names))
        found[name] = path, {n: t for n, t in meant.items() if not n.startswith("mtp.")}
    return found


def _sizes(family: str) -> dict[str, object]:
    return (
        {**_SIZES, "layer_types": ["linear_attention", "full_attention"]}
        if family == "qwen3_next"
        else _SIZES
    )


@pytest.mark.parametrize("name", ["single", "packed"])
def test_fp8_weights_are_widened_and_what_travels_is_not(
    name: str, quantised: dict[str, tuple[Path, Tensors]], tmp_path: Path
) -> None:
    source, meant = quantised[name]
    assert len(meant) > 8 and any(t.shape[-1] > 128 and t.shape[-2] > 128 for t in meant.values())
    ckpt, back = tmp_path / "ckpt", tmp_path / "back"
    run_world(FOUR, "checkpoint.ranks:import_all", cases=[(str(source), str(ckpt))])
    run_world(ONE, "checkpoint.ranks:export_all", cases=[(str(ckpt), str(back))])
    theirs, ours = stored(source), stored(back)
    assert ours.keys() == {n for n in theirs if n.removesuffix("_scale_inv") not in meant or n in meant}
    for tensor_name, (_, tensor) in theirs.items():
        if tensor_name in ours:
            assert same_bits(ours[tensor_name][1], meant.get(tensor_name, tensor)), tensor_name
    carried = [n for n, (_, t) in theirs.items() if t.dtype == torch.float8_e4m3fn and n.startswith("mtp.")]
    assert bool(carried) == (name == "packed")
    config = json.loads((source / "config.json").read_text())
    assert config.pop("quantization_config")
    assert json.loads((back / "config.json").read_text()) == config

    (loaded,) = run_world(ONE, "checkpoint.ranks:load_both_ways", cases=[(str(source), str(ckpt))])
    for way in ("hf", "checkpoint"):
        assert all(torch.equal(loaded[0][way]["weights"][n], t.float()) for n, t in meant.items()), way


def _without(name: str) -> Callable[[Path], None]:
    return lambda d: edit(d, lambda tensors: {n: t for n, t in tensors.items() if n != name})


def _with(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return lambda d: edit(d, lambda tensors: {**tensors, name: tensor})


def _changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return lambda d: edit(d, lambda tensors: {**tensors, name: change(tensors[name])})


_EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
_PACKED = "model.layers.1.mlp.experts.gate_up_proj"
_SCALE = "model.layers.0.self_attn.q_proj.weight_scale_inv"
_ROUTER = "model.layers.0.mlp.gate.weight"
# id -> (source, fault, parts of the message)
FAULTS: dict[str, tuple[str, Callable[[Path], None], tuple[str, ...]]] = {
    "missing expert": ("qwen3_moe", _without(_EXPERT), ("1 tensor(s) missing", _EXPERT)),
    "expert too many": (
        "qwen3_moe",
        _with("model.layers.0.mlp.experts.8.up_proj.weight", torch.ones(16, 32)),
        ("left over", "model.layers.0.mlp.experts.8.up_proj.weight"),
    ),
    "expert of another size": (
        "qwen3_moe",
        _changed(_EXPERT, lambda t: t[:-1]),
        (_EXPERT, "[15, 32]", "[16, 32]"),
    ),
    "experts in both forms": (
        "qwen3_moe",
        _with(_PACKED, torch.ones(8, 32, 32)),
        ("missing", "model.layers.0.mlp.experts.down_proj"),
    ),
    "too few packed experts": (
        "qwen3_5_moe-vl",
        _changed("model.language_model.layers.1.mlp.experts.gate_up_proj", lambda t: t[:-1]),
        ("model.language_model.layers.1.mlp.experts.gate_up_proj", "[7, 32, 32]", "[8, 32, 32]"),
    ),
    "no router bias": (
        "glm4_moe-groups",
        _without("model.layers.2.mlp.gate.e_score_correction_bias"),
        ("missing", "model.layers.2.mlp.gate.e_score_correction_bias"),
    ),
    "a layer that config.json does not announce": (
        "glm4_moe-groups",
        _with("model.layers.4.eh_proj.weight", torch.ones(2, 2)),
        ("left over", "model.layers.4.eh_proj.weight"),
    ),
    "a tensor beside the tower": (
        "qwen3_5_moe-vl",
        _with("model.audio.weight", torch.ones(2)),
        ("left over", "model.audio.weight"),
    ),
    "recurrent inputs of the other family": (
        "qwen3_5",
        _with("model.layers.0.linear_attn.in_proj_ba.weight", torch.ones(16, 32)),
        ("left over", "model.layers.0.linear_attn.in_proj_ba.weight"),
    ),
    "FP8 without scales": (
        "single",
        _without(_SCALE),
        (_SCALE.removesuffix("_scale_inv"), "scales", "missing"),
    ),
    "scales without a weight": (
        "single",
        _without(_SCALE.removesuffix("_scale_inv")),
        ("missing", _SCALE.removesuffix("_scale_inv")),
    ),
    "scales of a wide weight": (
        "single",
        _with(f"{_ROUTER}_scale_inv", torch.ones(1, 2)),
        (f"{_ROUTER}_scale_inv", "is not F8_E4M3"),
    ),
    "scales of another shape": ("single", _changed(_SCALE, lambda t: t[:, :1]), (_SCALE, "[1, 1]", "[1, 2]")),
    "scales of nothing": (
        "single",
        _with("model.layers.0.self_attn.x_proj.weight_scale_inv", torch.ones(1, 1)),
        ("left over", "x_proj.weight_scale_inv"),
    ),
    "a norm in FP8": (
        "single",
        _changed("model.norm.weight", lambda t: t.to(torch.float8_e4m3fn)),
        ("model.norm.weight", "F8_E4M3"),
    ),
}


def test_what_does_not_fit_is_named(
    root: Path, quantised: dict[str, tuple[Path, Tensors]], tmp_path: Path
) -> None:
    cases = []
    for index, (source, fault, _) in enumerate(FAULTS.values()):
        good = quantised[source][0] if source in quantised else write_source(root, source)
        directory = tmp_path / f"source{index}"
        shutil.copytree(good, directory)
        fault(directory)
        cases.append(("import", str(directory), str(tmp_path / f"target{index}")))
    first, second = run_world(World(tp=2), "checkpoint.ranks:refused", cases=cases)
    assert first == second, "the ranks disagree"
    for (name, (_, _, parts)), (_, _, target), message in zip(FAULTS.items(), cases, first, strict=True):
        assert all(part in message for part in parts), f"{name}: {message}"
        assert not Path(target).exists() and not incomplete_path(Path(target)).exists(), name


def test_a_checkpoint_that_lost_what_travels_is_not_exported(root: Path, tmp_path: Path) -> None:
    source, ckpt = write_source(root, "qwen3_5_moe-vl"), tmp_path / "ckpt"
    (accepted,) = run_world(ONE, "checkpoint.ranks:refused", cases=[("import", str(source), str(ckpt))])
    assert accepted == ["accepted"]
    held = {n: t for n, (_, t) in stored(ckpt / "hf").items()}
    theirs = {n: t for n, (_, t) in stored(source).items() if n.startswith(("mtp.", "model.visual."))}
    assert held.keys() == theirs.keys() and all(same_bits(held[n], t) for n, t in theirs.items())
    lost, cut = tmp_path / "lost", tmp_path / "cut"
    for copy in (lost, cut):
        shutil.copytree(ckpt, copy)
    (lost / "hf" / "carried.safetensors").unlink()
    content = (cut / "hf" / "carried.safetensors").read_bytes()
    (cut / "hf" / "carried.safetensors").write_bytes(content[:-8])
    cases = [("export", str(copy), str(tmp_path / f"{copy.name}-out")) for copy in (lost, cut)]
    (messages,) = run_world(ONE, "checkpoint.ranks:refused", cases=cases)
    assert "carried.safetensors: no such file" in messages[0]
    assert "carried.safetensors" in messages[1] and "truncated" in messages[1]
    assert not (tmp_path / "lost-out").exists() and not (tmp_path / "cut-out").exists()
