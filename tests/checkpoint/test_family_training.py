"""Claim: a run of a mixture of experts or of a hybrid, saved after 3 updates, ends bit-equal when resumed in its
layout; in another layout, expert-parallel or not, it holds the same weights and takes the same step; its checkpoint
keeps the tensors that travel with the model, and `export` writes them back.

Why the tests show it: as in `test_training_checkpoint`, whose rank functions are used: what a step reads or writes is
copied out of torch's optimizers, which are two (dense and expert parameters) under expert parallelism. The models
hold a router bias (a buffer), float32 parameters beside bfloat16 ones, packed experts and a vision tower. Not
shown: real gradients.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.family_sources import same_bits, stored, write_source
from harness import World, run_world

RANKS = "checkpoint.training_ranks"
HOME, AWAY = World(dp=2, ep=2), World(tp=2, pp=2)
# case -> parameter dtype of the run
CASES = {"glm4_moe-bf16": "bfloat16", "qwen3_5_moe-vl": "float32", "qwen3_next-bf16": "bfloat16"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("family-training")
    for case in CASES:
        write_source(path, case)
        (path / f"{case}-run").mkdir()
    return path


def _source(root: Path, case: str) -> str:
    return f'hf = "{root / case}"'


@pytest.fixture(scope="module")
def trained(root: Path) -> list[list[dict[str, Any]]]:
    cases = [(_source(root, case), dtype, str(root / f"{case}-run")) for case, dtype in CASES.items()]
    return run_world(HOME, f"{RANKS}:train", cases=cases)


def _resume(root: Path, world: World, name: str, again: str | None) -> list[list[dict[str, Any]]]:
    cases = []
    for case, dtype in CASES.items():
        folder = root / f"{case}-run"
        target = None if again is None else str(folder / again)
        cases.append((_source(root, case), dtype, str(folder / name), target))
    return run_world(world, f"{RANKS}:resume", cases=cases)


@pytest.fixture(scope="module")
def away(root: Path, trained: Any) -> list[list[dict[str, Any]]]:
    """Resumed in the other layout, saved there again, steps taken."""
    return _resume(root, AWAY, "own", "returned")


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], where: str) -> None:
    assert found.keys() == expected.keys(), where
    for name, tensor in expected.items():
        assert same_bits(found[name], tensor), f"{where} {name}"


@pytest.mark.parametrize("name", ["own", "returned"])
def test_resumed_it_ends_bit_equal(name: str, root: Path, trained: Any, away: Any) -> None:
    again = _resume(root, HOME, name, None)
    for rank in range(HOME.size):
        for index, case in enumerate(CASES):
            plain, resumed = trained[rank][index], again[rank][index]
            assert len(plain["kinds"]) == 2, "one optimizer for dense parameters, one for experts"
            moved = [n for n, t in plain["local3"].items() if not torch.equal(t, plain["local6"][n])]
            assert len(moved) > 0.9 * len(plain["local3"]) > 30, "the comparison is of live things"
            _assert_equal(resumed["local3"], plain["local3"], f"{case} rank {rank} after the load")
            _assert_equal(resumed["local6"], plain["local6"], f"{case} rank {rank} at the end")


def test_another_layout_takes_the_same_step(trained: Any, away: Any, report: Any) -> None:
    for index, (case, dtype) in enumerate(CASES.items()):
        home, guest = trained[0][index], away[0][index]
        _assert_equal(guest["whole3"], home["whole3"], f"{case} after the load")
        worst = 0.0
        for name, before in home["whole3"].items():
            expected = home["whole4"][name].double() - before.double()
            if name.endswith("e_score_correction_bias"):
                assert not expected.any(), "a buffer does not step"
                continue
            found = guest["whole4"][name].double() - before.double()
            assert expected.norm() > 0, name
            worst = max(worst, float((found - expected).norm() / expected.norm()))
        report(f"next step, {HOME.name} to {AWAY.name}, {case}: worst tensor", worst)
        assert worst < (1e-5 if dtype == "float32" else 2e-2)


def test_what_travels_comes_back_from_a_training_checkpoint(root: Path, away: Any, tmp_path: Path) -> None:
    """From a run that started from files, and from one that started from the checkpoint of another."""
    case = "qwen3_5_moe-vl"
    theirs = {n: t for n, (_, t) in stored(root / case).items()}
    carried = {n for n in theirs if n.startswith(("mtp.", "model.visual."))}
    arguments = {
        "source": "",
        "checkpoint": str(root / f"{case}-run" / "returned"),
        "hf_dir": str(tmp_path / "hf"),
    }
    (result,) = run_world(World(), f"{RANKS}:as_weights", **arguments)
    for folder in ("hf", "hf-again"):
        ours = {n: t for n, (_, t) in stored(tmp_path / folder).items()}
        assert ours.keys() == theirs.keys() and carried
        for name, tensor in ours.items():
            expected = theirs[name] if name in carried else result["whole"][name]
            assert same_bits(tensor, expected), f"{folder} {name}"
        assert not all(torch.equal(ours[n], theirs[n]) for n in ours), "training changed the weights"
