"""Claim: for mixtures of experts, Gated DeltaNet hybrids and GLM, `export` after `import` at another layout gives every
tensor of the source back bit-equal, in its dtype and file: experts stored one by one or packed, tensors that are
carried along, what the model keeps in float32. A model loaded at any layout holds exactly the source's weights.

Why the tests show it: directories that transformers wrote (with vision tower; multi-token-prediction tensors added) are
imported by one rank and exported by four at tp, pp and ep layouts, and the reverse; whole files are compared byte by
byte. Loaded models are gathered from parameters that started as NaN. Not shown: Transformer Engine modules, NCCL.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint.family_sources import SOURCES, assert_same_directory, stored, write_source
from harness import World, run_world

ONE = World()
EXPERTS = (
    "qwen3_moe",
    "qwen3_moe-sparse",
    "glm4_moe",
    "glm4_moe-groups",
    "glm4_moe-bf16",
    "glm4_moe_lite",
    "deepseek_v3",
)
RECURRENT = ("qwen3_next", "qwen3_next-bf16", "qwen3_5_moe-vl")  # with experts
DENSE = tuple(case for case in SOURCES if case not in EXPERTS + RECURRENT)
WORLDS = {
    World(tp=2, pp=2): tuple(SOURCES),
    World(tp=2, dp=2, ep=2): EXPERTS + RECURRENT,
    World(pp=2, dp=2, ep=2): EXPERTS + RECURRENT,
    World(cp=2, ep=2): EXPERTS + RECURRENT,
    World(cp=2, dp=2, ep=4): ("qwen3_moe", "qwen3_5_moe-vl"),
}
_IDS = [world.name for world in WORLDS]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("families")
    for case in SOURCES:
        write_source(path, case)
    return path


def _pairs(root: Path, cases: tuple[str, ...], source: str, target: Path) -> list[tuple[str, str]]:
    return [(str(root / f"{case}{source}"), str(target / case)) for case in cases]


@pytest.fixture(scope="module")
def imported(root: Path) -> Path:
    """Checkpoints of all sources, imported by one rank."""
    target = root / "ckpt"
    run_world(ONE, "checkpoint.ranks:import_all", cases=_pairs(root, tuple(SOURCES), "", target))
    return target


@pytest.mark.parametrize("world", WORLDS, ids=_IDS)
def test_imported_by_one_rank_and_exported_by_more(
    world: World, root: Path, imported: Path, tmp_path: Path
) -> None:
    cases = WORLDS[world]
    run_world(world, "checkpoint.ranks:export_all", cases=_pairs(imported, cases, "", tmp_path))
    for case in cases:
        assert_same_directory(tmp_path / case, root / case)


@pytest.mark.parametrize("world", list(WORLDS)[:3], ids=_IDS[:3])
def test_imported_by_four_ranks_and_exported_by_one(world: World, root: Path, tmp_path: Path) -> None:
    cases = WORLDS[world]
    run_world(world, "checkpoint.ranks:import_all", cases=_pairs(root, cases, "", tmp_path / "ckpt"))
    run_world(ONE, "checkpoint.ranks:export_all", cases=_pairs(tmp_path / "ckpt", cases, "", tmp_path))
    for case in cases:
        assert_same_directory(tmp_path / case, root / case)


@pytest.mark.parametrize("world", [ONE, *list(WORLDS)[1:4]], ids=["one", *_IDS[1:4]])
def test_both_sources_fill_the_same_parameters(world: World, root: Path, imported: Path) -> None:
    """Experts of all expert-parallel ranks are gathered; carried tensors are no part of the model."""
    cases = EXPERTS[:4] + RECURRENT[::2] if world != ONE else tuple(SOURCES)
    pairs = [(str(root / case), str(imported / case)) for case in cases]
    ranks = run_world(world, "checkpoint.ranks:load_both_ways", cases=pairs)
    for index, case in enumerate(cases):
        held = {name: tensor for name, (_, tensor) in stored(root / case).items() if _is_of_the_model(name)}
        assert len(held) > 20
        for rank, results in enumerate(ranks):
            for way in ("hf", "checkpoint"):
                result = results[index][way]
                assert result["unfilled"] == [], f"{case} rank {rank} from {way}"
                assert result["weights"].keys() == (held.keys() if rank == 0 else set()), (
                    f"{case} rank {rank}"
                )
        for way in ("hf", "checkpoint"):
            for name, tensor in held.items():
                assert torch.equal(ranks[0][index][way]["weights"][name], tensor.float()), (
                    f"{case} {name} from {way}"
                )


def _is_of_the_model(name: str) -> bool:
    return not name.startswith(("mtp.", "model.visual.", "model.layers.4."))


@pytest.mark.parametrize("world", [World(tp=2, dp=2, ep=2), World(pp=2, dp=2, ep=2)], ids=lambda w: w.name)
def test_gradients_have_the_names_of_the_source_and_trained_tensors_only(
    world: World, root: Path, tmp_path: Path
) -> None:
    for case in ("glm4_moe", "qwen3_5_moe-vl"):
        path = tmp_path / f"{case}.safetensors"
        run_world(world, "checkpoint.ranks:write_gradients", hf_dir=str(root / case), path=str(path))
        found = {name: tensor for name, (_, tensor) in _file(path).items()}
        trained = {
            name: tensor
            for name, (_, tensor) in stored(root / case).items()
            if _is_of_the_model(name) and not name.endswith("e_score_correction_bias")
        }
        assert found.keys() == trained.keys()
        assert all(torch.equal(found[name], 2 * tensor) for name, tensor in trained.items()), case


def _file(path: Path) -> dict[str, tuple[str, torch.Tensor]]:
    from safetensors.torch import load_file

    return {name: (path.name, tensor) for name, tensor in load_file(path).items()}
