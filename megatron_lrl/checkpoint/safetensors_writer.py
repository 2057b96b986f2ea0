"""Streaming safetensors writer: headers first, then each tensor at its place when it comes.

All shapes are known beforehand, so memory is that of one tensor, and tensors may come in any order, a large one in
parts along its first axis.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from megatron_lrl.checkpoint.safetensors_io import (
    DTYPE_NAMES,
    DTYPES,
    INDEX_FILE,
    FileLayout,
    TensorRecord,
)


class TensorPart(NamedTuple):
    """A tensor, or (with `part`) one part of it along its first axis, the others of which come by themselves."""

    name: str
    tensor: torch.Tensor
    part: int | None = None


class Stored(NamedTuple):
    """A tensor as the bytes of its recorded dtype, in blocks."""

    name: str
    blocks: Iterator[memoryview]


Given = TensorPart | Stored | tuple[str, torch.Tensor]
_Place = tuple[TensorRecord, BinaryIO, int]  # a tensor's record, its file and its position there


def write_directory(directory: Path, layout: FileLayout, tensors: Iterable[Given]) -> None:
    """Write the files of `layout` into `directory`; each tensor is cast to its recorded dtype.

    Raises:
        ValueError: a tensor not in the layout, of another shape, given twice, or not given at all.
    """
    with ExitStack() as stack:
        files = sorted({record.file for record in layout.tensors})
        places: dict[str, _Place] = {}
        for name in files:
            records = [record for record in layout.tensors if record.file == name]
            handle: BinaryIO = stack.enter_context((directory / name).open("wb"))
            places |= _write_header(handle, records, layout.metadata.get(name, {"format": "pt"}))
        _fill(places, tensors)
        for _, handle, _ in places.values():
            handle.flush()
            os.fsync(handle.fileno())
    if layout.indexed:
        total = sum(record.nbytes for record in layout.tensors)
        index = {
            "metadata": dict(layout.index_metadata) or {"total_size": total},
            "weight_map": {record.name: record.file for record in layout.tensors},
        }
        (directory / INDEX_FILE).write_text(
            json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )


def write_file(
    path: str | Path,
    shapes: Mapping[str, tuple[torch.dtype, Iterable[int]]],
    tensors: Iterable[Given],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one safetensors file of the given dtypes and shapes under a temporary name, then rename it."""
    path = Path(path)
    records = [
        TensorRecord(name, path.name, DTYPE_NAMES[dtype], tuple(shape))
        for name, (dtype, shape) in shapes.items()
    ]
    write_records(path, records, tensors, metadata)


def write_records(
    path: Path,
    records: Iterable[TensorRecord],
    tensors: Iterable[Given],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """As `write_file`, of the given records."""
    partial = path.with_name(path.name + ".incomplete")
    try:
        with partial.open("wb") as handle:
            places = _write_header(handle, records, metadata or {"format": "pt"})
            _fill(places, tensors)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _write_header(
    handle: BinaryIO, records: Iterable[TensorRecord], metadata: Mapping[str, str]
) -> dict[str, _Place]:
    """Write a file's header and reserve its data; returns each tensor's record, handle and byte position."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset, offsets = 0, {}
    for record in records:
        offsets[record.name] = offset
        header[record.name] = {
            "dtype": record.dtype,
            "shape": list(record.shape),
            "data_offsets": [offset, offset + record.nbytes],
        }
        offset += record.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    handle.write(len(encoded).to_bytes(8, "little") + encoded)
    start = 8 + len(encoded)
    handle.truncate(start + offset)
    return {record.name: (record, handle, start + offsets[record.name]) for record in records}


def _fill(places: Mapping[str, _Place], tensors: Iterable[Given]) -> None:
    written: dict[str, set[int | None]] = {}
    for given in tensors:
        name, part = given[0], given.part if isinstance(given, TensorPart) else None
        done = written.setdefault(name, set())
        if name not in places or part in done or (done and (part is None or None in done)):
            raise ValueError(f"tensor {name} was given {'twice' if done else 'but is not in the layout'}")
        done.add(part)
        if isinstance(given, Stored):
            _write_blocks(places[name], given.blocks)
        else:
            _write_tensor(places[name], given[1], part)
        del given  # before the next one comes
    for name, (record, _, _) in places.items():
        done = written.get(name, set())
        if done != {None} and (not done or len(done) != record.shape[0]):
            missing = sorted(places.keys() - written)
            told = (
                f"{len(missing)} tensor(s) of the layout were not given, first: {missing[0]}"
                if missing
                else ""
            )
            raise ValueError(told or f"tensor {name}: {len(done)} of its {record.shape[0]} parts were given")


def _write_tensor(place: _Place, tensor: torch.Tensor, part: int | None) -> None:
    record, handle, position = place
    shape = record.shape if part is None else record.shape[1:]
    if tuple(tensor.shape) != shape:
        raise ValueError(f"tensor {record.name} has shape {tuple(tensor.shape)}, the layout says {shape}")
    data = tensor.detach().to(device="cpu", dtype=DTYPES[record.dtype]).contiguous()
    handle.seek(position + (part or 0) * data.nbytes)
    handle.write(data.reshape(-1).view(torch.uint8).numpy().data)


def _write_blocks(place: _Place, blocks: Iterator[memoryview]) -> None:
    record, handle, position = place
    handle.seek(position)
    count = sum(handle.write(block) for block in blocks)
    if count != record.nbytes:
        raise ValueError(f"tensor {record.name} came with {count} bytes, the layout says {record.nbytes}")
