"""Claim: every bad directory or checkpoint is one UserError, the same on every rank, that names the file
and the tensor; nothing is overwritten and nothing half-written stays.

Why the tests show it: each fault is seeded into a good directory, and a world of two tensor-parallel ranks
imports, exports or loads it; the messages of both ranks are compared, and the target is looked at
afterwards. Two-rank worlds also show that no rank waits for one that failed. Not shown: a disk that fills
up, a file that changes while it is read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import World, run_world
from oracle.tiny_models import make_hf_dir
from safetensors.torch import load_file, save_file

from megatron_lrl.checkpoint.publish import incomplete_path

INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00005.safetensors"


def _cut(path: Path, keep: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def _truncate_shard(d: Path) -> None:
    _cut(d / FIRST, 0.7)


def _truncate_header(d: Path) -> None:
    (d / FIRST).write_bytes((d / FIRST).read_bytes()[:20])


def _grow_shard(d: Path) -> None:
    (d / FIRST).write_bytes((d / FIRST).read_bytes() + b"12")


def _remove_shard(d: Path) -> None:
    (d / FIRST).unlink()


def _edit_index(d: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((d / INDEX).read_text())
    change(index["weight_map"])
    (d / INDEX).write_text(json.dumps(index))


def _index_names_a_missing_tensor(d: Path) -> None:
    _edit_index(d, lambda m: m.update({"model.layers.9.mlp.up_proj.weight": FIRST}))


def _index_forgets_a_tensor(d: Path) -> None:
    _edit_index(d, lambda m: m.pop("model.embed_tokens.weight"))


def _index_points_outside(d: Path) -> None:
    _edit_index(d, lambda m: m.update({"model.norm.weight": "../other.safetensors"}))


def _index_is_not_json(d: Path) -> None:
    (d / INDEX).write_text('{"weight_map": ')


def _edit_shard(d: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Changes one tensor, or drops it from its file and the index."""
    file = d / json.loads((d / INDEX).read_text())["weight_map"][name]
    tensors = load_file(file)
    changed = change(tensors.pop(name))
    if changed is None:
        _edit_index(d, lambda m: m.pop(name))
    else:
        tensors[name] = changed.contiguous()
    save_file(tensors, file)


def _wrong_shape(d: Path) -> None:
    _edit_shard(d, "model.layers.1.self_attn.k_proj.weight", lambda t: t[:-1])


def _wrong_dtype(d: Path) -> None:
    _edit_shard(d, "model.layers.2.mlp.down_proj.weight", lambda t: t.to(torch.int8))


def _missing_tensor(d: Path) -> None:
    _edit_shard(d, "model.layers.3.self_attn.q_proj.bias", lambda t: None)


def _left_over_tensor(d: Path) -> None:
    save_file({"model.extra.weight": torch.ones(3)}, d / "extra.safetensors")
    _edit_index(d, lambda m: m.update({"model.extra.weight": "extra.safetensors"}))


def _tied_but_different(d: Path) -> None:
    config = json.loads((d / "config.json").read_text())
    (d / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))


def _no_config(d: Path) -> None:
    (d / "config.json").unlink()


def _only_pickles(d: Path) -> None:
    for path in d.glob("*.safetensors*"):
        path.unlink()
    (d / "pytorch_model.bin").write_bytes(b"\x80\x04.")


# id -> (fault, parts the message must hold)
FAULTS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "missing shard": (_remove_shard, (FIRST, "no such file")),
    "truncated shard": (_truncate_shard, (FIRST, "truncated: tensor model.")),
    "truncated header": (_truncate_header, (FIRST, "truncated")),
    "bytes too many": (_grow_shard, (FIRST, "2 bytes after the last tensor")),
    "index names a missing tensor": (
        _index_names_a_missing_tensor,
        (FIRST, "lacks tensor model.layers.9.mlp.up_proj.weight"),
    ),
    "index forgets a tensor": (_index_forgets_a_tensor, ("model.embed_tokens.weight", "does not name it")),
    "index points outside": (_index_points_outside, (INDEX, "../other.safetensors")),
    "index is not JSON": (_index_is_not_json, (INDEX, "not valid JSON")),
    "wrong shape": (_wrong_shape, ("model.layers.1.self_attn.k_proj.weight", "[15, 32]", "[16, 32]")),
    "wrong dtype": (_wrong_dtype, ("model.layers.2.mlp.down_proj.weight", "I8")),
    "missing tensor": (_missing_tensor, ("missing", "model.layers.3.self_attn.q_proj.bias")),
    "left-over tensor": (_left_over_tensor, ("left over", "model.extra.weight")),
    "tied head that differs": (_tied_but_different, ("lm_head.weight differs", "tie_word_embeddings")),
    "no config": (_no_config, ("config.json", "no such file")),
    "only pickles": (_only_pickles, ("only safetensors are read",)),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("refusals")
    path = make_hf_dir(root / "good", "qwen2", 11, max_shard_size="40KB")
    assert (path / FIRST).exists(), "the faults name this shard"
    return path


def _run(cases: list[tuple[str, Path, Path]]) -> list[str]:
    plain = [(verb, str(source), str(target)) for verb, source, target in cases]
    first, second = run_world(World(tp=2), "checkpoint.ranks:refused", cases=plain)
    assert first == second, "the ranks disagree"
    return first


def test_bad_sources_are_named(good: Path, tmp_path: Path) -> None:
    cases = []
    for index, (fault, _) in enumerate(FAULTS.values()):
        directory = tmp_path / f"source{index}"
        shutil.copytree(good, directory)
        fault(directory)
        cases.append(("import", directory, tmp_path / f"target{index}"))
    for (name, (_, parts)), (_, _, target), message in zip(FAULTS.items(), cases, _run(cases), strict=True):
        assert all(part in message for part in parts), f"{name}: {message}"
        assert not target.exists() and not incomplete_path(target).exists(), name


def test_targets_and_checkpoints_are_protected(good: Path, tmp_path: Path) -> None:
    occupied, plain_file = tmp_path / "occupied", tmp_path / "file"
    occupied.mkdir()
    (occupied / "precious").write_text("kept")
    plain_file.write_text("kept")
    odd = make_hf_dir(tmp_path / "odd", "llama", 1, heads=3, kv_heads=3, hidden=48, head_dim=16)
    other = make_hf_dir(tmp_path / "other", "qwen2", 11, rope="linear")
    ckpt, damaged, lacking = tmp_path / "ckpt", tmp_path / "damaged", tmp_path / "lacking"
    assert _run([("import", good, ckpt)]) == ["accepted"]
    for copy in (damaged, lacking):
        shutil.copytree(ckpt, copy)
    for path in damaged.glob("*.distcp"):
        _cut(path, 0.5)
    (lacking / "megatron_lrl.json").unlink()
    edited = tmp_path / "edited"
    shutil.copytree(ckpt, edited)
    config = json.loads((edited / "hf" / "config.json").read_text())
    (edited / "hf" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))

    expected = [
        (("import", good, occupied), ("occupied", "not an empty directory")),
        (("import", good, plain_file), ("file", "not an empty directory")),
        (("import", good, plain_file / "below"), ("below", "cannot be created")),
        (("export", ckpt, occupied), ("occupied", "not an empty directory")),
        (("import", odd, tmp_path / "t1"), ("parallel.tp = 2", "KV heads")),
        (("import", tmp_path / "nowhere", tmp_path / "t2"), ("nowhere", "no such directory")),
        (("export", good, tmp_path / "t3"), ("megatron_lrl.json", "no such file")),
        (("export", lacking, tmp_path / "t4"), ("megatron_lrl.json", "no such file")),
        (("export", damaged, tmp_path / "t5"), ("damaged", "cannot be read as a distributed checkpoint")),
        (("export", edited, tmp_path / "t6"), ("another model", "norm_eps is 1e-06 there and 1e-05 here")),
        (("load", other, ckpt), ("ckpt", "another model", "rope is")),
        (("load", good, ckpt), ("accepted",)),
    ]
    messages = _run([case for case, _ in expected])
    for ((verb, source, target), parts), message in zip(expected, messages, strict=True):
        assert all(part in message for part in parts), f"{verb} {source.name} {target.name}: {message}"
    assert [p.name for p in occupied.iterdir()] == ["precious"]
    assert (occupied / "precious").read_text() == plain_file.read_text() == "kept"
    assert not [
        p for p in tmp_path.iterdir() if p.name.startswith(("t1", "t2", "t3", "t4", "t5", "t6", ".t"))
    ]


def test_what_an_interrupted_run_left_is_replaced(good: Path, tmp_path: Path) -> None:
    target = tmp_path / "ckpt"
    incomplete_path(target).mkdir()
    (incomplete_path(target) / "half").write_text("written")
    target.mkdir()  # an empty directory is a valid target
    assert _run([("import", good, target)]) == ["accepted"]
    assert not incomplete_path(target).exists() and not (target / "half").exists()
    assert (target / "megatron_lrl.json").exists()
