"""Claim: the writer's files are valid safetensors whatever the order tensors come in, and the reader serves
any slice.

Why the tests show it: files are read back by the safetensors library itself; slices are compared with
slices of the whole tensor; wrong input to the writer raises and leaves no file. Tensors come whole, in parts, or as
stored bytes. Not shown: files beyond memory.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_lrl.checkpoint.safetensors_io import DTYPES, FileLayout, SafetensorsReader, TensorRecord
from megatron_lrl.checkpoint.safetensors_writer import Stored, TensorPart, write_directory, write_file
from megatron_lrl.errors import UserError


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (5, 3), "b": (7,), "c": (2, 3, 4), "scalar": (), "empty": (0, 3)}
    dtypes = [*DTYPES.values(), torch.float32]
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True)
    }


def _layout(tensors: dict[str, torch.Tensor], files: dict[str, str], indexed: bool) -> FileLayout:
    names = {dtype: name for name, dtype in DTYPES.items()}
    records = [TensorRecord(n, files[n], names[t.dtype], tuple(t.shape)) for n, t in tensors.items()]
    return FileLayout(tuple(records), indexed, {file: {"format": "pt"} for file in files.values()})


def test_shards_written_in_reverse_order_read_back(tmp_path: Path) -> None:
    tensors = _tensors()
    files = {name: f"part{i % 2}.safetensors" for i, name in enumerate(tensors)}
    layout = _layout(tensors, files, indexed=True)
    write_directory(tmp_path, layout, reversed(tensors.items()))
    for name, tensor in tensors.items():
        with safe_open(tmp_path / files[name], framework="pt") as handle:
            assert handle.metadata() == {"format": "pt"}
            found = handle.get_tensor(name)
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"] == files
    with SafetensorsReader(tmp_path) as reader:
        assert {r.name: r.file for r in reader.layout.tensors} == files
        assert FileLayout.from_dict(json.loads(json.dumps(reader.layout.to_dict()))) == reader.layout


def test_slices_of_either_axis(tmp_path: Path) -> None:
    weight = torch.arange(24.0).reshape(6, 4).to(torch.bfloat16)
    save_file({"w": weight}, tmp_path / "model.safetensors")
    with SafetensorsReader(tmp_path) as reader:
        assert torch.equal(reader.tensor("w")[(slice(2, 5),)], weight[2:5])
        assert torch.equal(reader.tensor("w")[(slice(None), slice(1, 3))], weight[:, 1:3])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([("a", torch.ones(2)), ("b", torch.ones(3)), ("b", torch.ones(3))], "twice"),
        ([("a", torch.ones(2))], "not given, first: b"),
        ([("a", torch.ones(2)), ("c", torch.ones(3))], "not in the layout"),
        ([("a", torch.ones(3))], "has shape"),
    ],
)
def test_the_writer_refuses_a_wrong_set_and_leaves_no_file(
    given: list[tuple[str, torch.Tensor]], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "out.safetensors"
    path.write_text("the file before")
    shapes = {"a": (torch.float32, (2,)), "b": (torch.float32, (3,))}
    with pytest.raises(ValueError, match=message):
        write_file(path, shapes, given)
    assert [p.name for p in tmp_path.iterdir()] == ["out.safetensors"]
    assert path.read_text() == "the file before"


def test_one_file_is_cast_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "grad.safetensors"
    path.write_text("old")
    write_file(path, {"g": (torch.float32, (2,))}, [("g", torch.tensor([1.5, -2.0], dtype=torch.bfloat16))])
    (tensor,) = load_file(path).values()
    assert tensor.dtype == torch.float32 and tensor.tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"a": {"dtype": "F32", "shape": [2]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}',
        b'{"a": {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]}}',
        b'{"a": 3}',
        b"[" * 100_000,
        b'{"a": {"dtype": "F32", "shape": [1e400], "data_offsets": [0, 8]}}',
    ],
)
def test_impossible_headers_are_user_errors(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(UserError, match=r"model\.safetensors: damaged safetensors header"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_file_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to("/proc/self/mem")  # a regular file that even root cannot read
    with pytest.raises(UserError, match=rf"{name}: cannot be read: "):
        SafetensorsReader(tmp_path)


def test_a_single_file_beside_an_index_is_ambiguous(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(UserError, match="holds both"):
        SafetensorsReader(tmp_path)


def test_a_tensor_may_come_in_parts_and_another_as_stored_bytes(tmp_path: Path) -> None:
    packed = torch.arange(24.0).reshape(3, 4, 2)
    counts = torch.tensor([[1, -2], [3, 4]])
    odd = torch.randn(5).to(torch.float8_e4m3fn)
    save_file({"packed": packed, "counts": counts, "odd": odd}, tmp_path / "model.safetensors")
    target = tmp_path / "target"
    target.mkdir()
    with SafetensorsReader(tmp_path) as reader:
        for part in range(3):  # one part of a tensor reads like a tensor, slices of both axes included
            assert torch.equal(
                reader.tensor("packed", part)[(slice(1, 3), slice(1, 2))], packed[part, 1:3, 1:2]
            )
        kept = [Stored(name, reader.blocks(name)) for name in ("counts", "odd")]
        parts = [TensorPart("packed", packed[part], part) for part in (2, 0, 1)]
        write_directory(target, reader.layout, [*kept, *parts])
        for wrong, message in (
            ([*parts[:2]], "2 of its 3 parts were given"),
            ([*parts, parts[0]], "twice"),
            ([*parts, TensorPart("packed", packed)], "twice"),
            ([TensorPart("packed", packed[0])], "has shape"),
        ):
            again = [Stored(name, reader.blocks(name)) for name in ("counts", "odd")]
            with pytest.raises(ValueError, match=message):
                write_directory(target, reader.layout, [*again, *wrong])
        write_directory(target, reader.layout, [Stored("counts", reader.blocks("counts")), *parts,
                                                Stored("odd", reader.blocks("odd"))])  # fmt: skip
    assert (target / "model.safetensors").read_bytes()[-100:] == (
        tmp_path / "model.safetensors"
    ).read_bytes()[-100:]
    found = load_file(target / "model.safetensors")
    assert torch.equal(found["packed"], packed) and torch.equal(found["counts"], counts)
    assert torch.equal(found["odd"].view(torch.uint8), odd.view(torch.uint8))


def _shards(folder: Path, tensors: dict[str, torch.Tensor], total: int = 2) -> list[str]:
    names = [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(2)]
    for part, name in enumerate(names):
        save_file(dict(list(tensors.items())[part::2]), folder / name)
    return names


def test_an_index_may_name_the_single_file(tmp_path: Path) -> None:
    save_file(_tensors(), tmp_path / "model.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(_tensors(), "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with SafetensorsReader(tmp_path) as reader:
        assert reader.layout.indexed and {r.name for r in reader.layout.tensors} == _tensors().keys()
        assert torch.equal(reader.tensor("b")[(slice(None),)], _tensors()["b"])
    index["weight_map"]["b"] = "other.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="holds both"):
        SafetensorsReader(tmp_path)


def test_a_whole_set_of_shards_needs_no_index(tmp_path: Path) -> None:
    names = _shards(tmp_path, _tensors())
    with SafetensorsReader(tmp_path) as reader:
        assert {r.name: r.file for r in reader.layout.tensors} == {
            name: names[i % 2] for i, name in enumerate(_tensors())
        }
        (tmp_path / "again").mkdir()
        write_directory(tmp_path / "again", reader.layout, _tensors().items())
        assert sorted(path.name for path in (tmp_path / "again").iterdir()) == [
            *names,
            "model.safetensors.index.json",
        ]
    (tmp_path / names[0]).rename(tmp_path / "kept")
    with pytest.raises(
        UserError, match=r"not a whole set \(model-00002-of-00002\.safetensors\): shards 1 to 2"
    ):
        SafetensorsReader(tmp_path)
    save_file({"b": torch.ones(1)}, tmp_path / names[0])
    with pytest.raises(UserError, match=r"tensor b is in model-00001-of-00002\.safetensors too"):
        SafetensorsReader(tmp_path)


def test_what_is_there_instead_of_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither model\.safetensors nor .*; only safetensors are read"):
        SafetensorsReader(tmp_path)
    save_file({"b": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    with pytest.raises(UserError, match=r"but consolidated\.safetensors"):
        SafetensorsReader(tmp_path)
