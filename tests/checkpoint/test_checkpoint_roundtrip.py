"""Claim: `export` after `import` gives every tensor back bit-equal, with its dtype and file, for every
family and across layouts; and a model loaded from the Hugging Face directory equals one loaded from its
checkpoint.

Why the tests show it: directories written by transformers itself are imported by one rank and exported by
four (tp 2, pp 2), and the reverse; whole files are compared. Parameters start as NaN before loading, so an
unfilled one shows. Cases cover tied and untied heads, a stored tied head, biases, QK norms, head_dim !=
hidden / heads, a prime vocabulary, bf16, fp16, mixed dtypes and sharded directories. Not shown: Transformer
Engine modules, NCCL, changed weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness import World, run_world
from oracle.tiny_models import CASES, make_hf_dir, write_case
from safetensors import safe_open
from safetensors.torch import load_file, save_file

ONE, FOUR = World(), World(tp=2, pp=2)


def _extra_cases(root: Path) -> list[Path]:
    mixed = make_hf_dir(root / "mixed", "qwen2", 3, dtype=torch.bfloat16, tied=True)
    tensors = load_file(mixed / "model.safetensors")
    norms = {name: t.float() + 1e-4 for name, t in tensors.items() if name.endswith("norm.weight")}
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file({**tensors, **norms, **head}, mixed / "model.safetensors", metadata={"format": "pt"})
    (mixed / "tokenizer.json").write_text('{"any": "content"}')
    return [
        mixed,
        make_hf_dir(root / "bf16-sharded", "qwen3", 4, dtype=torch.bfloat16, max_shard_size="20KB"),
        make_hf_dir(root / "fp16", "llama", 5, dtype=torch.float16, vocab=5),
        make_hf_dir(
            root / "bias-sharded", "llama", 6, attention_bias=True, head_dim=12, max_shard_size="30KB"
        ),
        make_hf_dir(root / "qwen3-bias", "qwen3", 8, attention_bias=True, tied=True, kv_heads=4),
    ]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("hf")
    return [*(write_case(root, case) for case in CASES), *_extra_cases(root)]


@pytest.fixture(scope="module")
def checkpoints(sources: list[Path]) -> list[Path]:
    """Checkpoints of all sources, imported by one rank."""
    found = [source.with_name(source.name + "-ckpt") for source in sources]
    run_world(ONE, "checkpoint.ranks:import_all", cases=_pairs(sources, found))
    return found


def _pairs(sources: list[Path], targets: list[Path]) -> list[tuple[str, str]]:
    return [(str(a), str(b)) for a, b in zip(sources, targets, strict=True)]


def _stored(directory: Path) -> dict[str, tuple[str, torch.Tensor]]:
    """Name -> (file, tensor) of all safetensors files of a directory."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as handle:
            tensors |= {name: (path.name, handle.get_tensor(name)) for name in handle.keys()}  # noqa: SIM118
    return tensors


def _assert_same_directory(found: Path, expected: Path) -> None:
    assert sorted(p.name for p in found.iterdir()) == sorted(p.name for p in expected.iterdir())
    ours, theirs = _stored(found), _stored(expected)
    assert ours.keys() == theirs.keys() and len(theirs) > 20
    for name, (file, tensor) in theirs.items():
        assert ours[name][0] == file
        assert ours[name][1].dtype == tensor.dtype, name
        width = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
        assert torch.equal(ours[name][1].view(width), tensor.view(width)), name
    for path in expected.iterdir():
        if path.suffix != ".safetensors":
            assert (found / path.name).read_bytes() == path.read_bytes(), path.name


def test_imported_by_one_rank_and_exported_by_four(
    sources: list[Path], checkpoints: list[Path], tmp_path: Path
) -> None:
    targets = [tmp_path / source.name for source in sources]
    run_world(FOUR, "checkpoint.ranks:export_all", cases=_pairs(checkpoints, targets))
    for target, source in zip(targets, sources, strict=True):
        _assert_same_directory(target, source)


def test_imported_by_four_ranks_and_exported_by_one(sources: list[Path], tmp_path: Path) -> None:
    checkpoints = [tmp_path / f"{source.name}-ckpt" for source in sources]
    targets = [tmp_path / source.name for source in sources]
    run_world(FOUR, "checkpoint.ranks:import_all", cases=_pairs(sources, checkpoints))
    run_world(ONE, "checkpoint.ranks:export_all", cases=_pairs(checkpoints, targets))
    for target, source in zip(targets, sources, strict=True):
        _assert_same_directory(target, source)


@pytest.mark.parametrize("world", [ONE, World(tp=2, cp=2), World(pp=2, dp=2)], ids=lambda w: w.name)
def test_both_sources_fill_the_same_parameters(
    world: World, sources: list[Path], checkpoints: list[Path]
) -> None:
    ranks = run_world(world, "checkpoint.ranks:load_both_ways", cases=_pairs(sources, checkpoints))
    for index, source in enumerate(sources):
        stored = {name: tensor for name, (_, tensor) in _stored(source).items()}
        if json.loads((source / "config.json").read_text())["tie_word_embeddings"]:
            stored.pop("lm_head.weight", None)
        for rank, results in enumerate(ranks):
            for way in ("hf", "checkpoint"):
                result = results[index][way]
                assert result["unfilled"] == [], f"{source.name} rank {rank} from {way}"
                assert result["weights"].keys() == (stored.keys() if rank == 0 else set())
        for way in ("hf", "checkpoint"):
            for name, tensor in stored.items():
                assert torch.equal(ranks[0][index][way]["weights"][name], tensor.float()), (
                    f"{source.name} {name}"
                )


def test_gradients_have_hugging_face_names_and_shapes(sources: list[Path], tmp_path: Path) -> None:
    source = next(path for path in sources if path.name == "qwen3-tied-yarn")
    path = tmp_path / "grad.safetensors"
    names = run_world(FOUR, "checkpoint.ranks:write_gradients", hf_dir=str(source), path=str(path))
    assert (
        "output_layer.weight" in names[-1]
    )  # the last stage does hold a tied copy, which must not be written
    found, weights = load_file(path), load_file(source / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert found[name].dtype == torch.float32 and torch.equal(found[name], 2 * weight), name
