"""Streaming safetensors writer: headers first, then each tensor at its place when it comes.

All shapes are known beforehand, so memory is that of one tensor, and tensors may come in any order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megatron_lrl.checkpoint.safetensors_io import (
    DTYPE_NAMES,
    DTYPES,
    INDEX_FILE,
    FileLayout,
    TensorRecord,
)


def write_directory(directory: Path, layout: FileLayout, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write the files of `layout` into `directory`; each tensor is cast to its recorded dtype.

    Raises:
        ValueError: a tensor not in the layout, of another shape, given twice, or not given at all.
    """
    with ExitStack() as stack:
        files = sorted({record.file for record in layout.tensors})
        places: dict[str, tuple[TensorRecord, BinaryIO, int]] = {}
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
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one safetensors file of the given dtypes and shapes under a temporary name, then rename it."""
    path = Path(path)
    partial = path.with_name(path.name + ".incomplete")
    records = [
        TensorRecord(name, path.name, DTYPE_NAMES[dtype], tuple(shape))
        for name, (dtype, shape) in shapes.items()
    ]
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
) -> dict[str, tuple[TensorRecord, BinaryIO, int]]:
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


def _fill(
    places: Mapping[str, tuple[TensorRecord, BinaryIO, int]], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    written: set[str] = set()
    for name, tensor in tensors:
        if name not in places or name in written:
            raise ValueError(
                f"tensor {name} was given {'twice' if name in written else 'but is not in the layout'}"
            )
        record, handle, position = places[name]
        if tuple(tensor.shape) != record.shape:
            raise ValueError(f"tensor {name} has shape {tuple(tensor.shape)}, the layout says {record.shape}")
        data = tensor.detach().to(device="cpu", dtype=DTYPES[record.dtype]).contiguous()
        handle.seek(position)
        handle.write(data.reshape(-1).view(torch.uint8).numpy().data)
        written.add(name)
    if missing := sorted(places.keys() - written):
        raise ValueError(f"{len(missing)} tensor(s) of the layout were not given, first: {missing[0]}")
