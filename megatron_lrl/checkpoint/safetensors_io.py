"""Streaming safetensors reader: a directory of one or many files, read slice by slice.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the
data. Headers are read and checked here, so that a damaged file is named before any weight is touched; the
bytes of tensors are served by the safetensors library. `safetensors_writer` is the counterpart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megatron_lrl.errors import UserError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # bytes, the format's own limit


@dataclass(frozen=True)
class TensorRecord:
    """One stored tensor: `dtype` is safetensors' name (F32, BF16, ...)."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of data; the dtype must be one of `DTYPES`."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class FileLayout:
    """Which tensor lies in which file, in stored order; enough to write the same files again.

    `indexed` says that an index file names the shards; `metadata` is each file's own, `index_metadata` the
    index's.
    """

    tensors: tuple[TensorRecord, ...]
    indexed: bool = False
    metadata: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    index_metadata: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON form; inverse of `from_dict`."""
        return {
            "indexed": self.indexed,
            "metadata": {name: dict(values) for name, values in self.metadata.items()},
            "index_metadata": dict(self.index_metadata),
            "tensors": [[t.name, t.file, t.dtype, list(t.shape)] for t in self.tensors],
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> FileLayout:
        """Raises KeyError, TypeError or ValueError on a dictionary of another form."""
        tensors = tuple(
            TensorRecord(str(name), plain_name(file), str(dtype), tuple(int(n) for n in shape))
            for name, file, dtype, shape in plain["tensors"]
        )
        return cls(tensors, bool(plain["indexed"]), dict(plain["metadata"]), dict(plain["index_metadata"]))

    def without(self, names: Iterable[str]) -> FileLayout:
        """The same layout lacking some tensors."""
        dropped = set(names)
        kept = tuple(t for t in self.tensors if t.name not in dropped)
        return FileLayout(kept, self.indexed, self.metadata, self.index_metadata)


class LazyTensor:
    """A stored tensor; indexing it with slices reads those bytes only."""

    def __init__(self, record: TensorRecord, path: Path, handle: Any) -> None:
        self.record = record
        self._path = path
        self._slice = handle.get_slice(record.name)

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        try:
            return self._slice[index]
        except Exception as error:  # the library's error class covers all of its failures
            raise UserError(f"{self._path}: tensor {self.record.name} cannot be read: {error}") from error


class SafetensorsReader:
    """The weights of a Hugging Face directory. Opening reads and checks all headers; use as a context
    manager.

    Raises:
        UserError: no weights, missing or damaged file, an index that disagrees with its files, a tensor
        stored twice.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.layout = _read_layout(self.directory)
        self._records = {record.name: record for record in self.layout.tensors}
        self._handles: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.clear()
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def record(self, name: str) -> TensorRecord:
        """What the headers say about a tensor; KeyError if there is none of this name."""
        return self._records[name]

    def path(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self.directory / self._records[name].file

    def tensor(self, name: str) -> LazyTensor:
        """A lazily sliceable handle; files open on first use and stay open until the reader closes."""
        path = self.path(name)
        if path.name not in self._handles:
            try:
                handle = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except Exception as error:  # SafetensorError, OSError
                raise UserError(f"{path}: damaged safetensors file: {error}") from error
            self._handles[path.name] = handle
        return LazyTensor(self._records[name], path, self._handles[path.name])


def plain_name(file: Any) -> str:
    """A file name without directory part, else ValueError: an index must not point elsewhere."""
    if not isinstance(file, str) or not file or Path(file).name != file:
        raise ValueError(f"{file!r} is not a plain file name")
    return file


def _read_layout(directory: Path) -> FileLayout:
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file() and index.is_file():
        raise UserError(f"{directory}: holds both {SINGLE_FILE} and {INDEX_FILE}; keep the one that is meant")
    if single.is_file():
        records, metadata = _read_header(single)
        return FileLayout(tuple(records), False, {SINGLE_FILE: metadata})
    if not index.is_file():
        raise UserError(
            f"{directory}: holds neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors are read"
        )
    return _read_indexed(directory, index)


def _read_indexed(directory: Path, index: Path) -> FileLayout:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        weight_map = {str(name): plain_name(file) for name, file in content["weight_map"].items()}
        index_metadata = dict(content.get("metadata") or {})
    except (
        json.JSONDecodeError,
        UnicodeDecodeError,
        KeyError,
        TypeError,
        AttributeError,
        ValueError,
    ) as error:
        raise UserError(
            f"{index}: not a safetensors index (weight_map from tensor to file name): {error}"
        ) from error
    tensors: list[TensorRecord] = []
    metadata: dict[str, Mapping[str, str]] = {}
    for file in sorted(set(weight_map.values())):
        path = directory / file
        if not path.is_file():
            first = min(name for name, where in weight_map.items() if where == file)
            raise UserError(f"{path}: no such file, but {index.name} puts tensor {first} there")
        records, metadata[file] = _read_header(path)
        for record in records:
            if weight_map.get(record.name) != file:
                told = weight_map.get(record.name)
                says = f"puts it in {told}" if told else "does not name it"
                raise UserError(f"{path}: holds tensor {record.name}, but {index.name} {says}")
        tensors += records
    held = {record.name for record in tensors}
    for name, file in sorted(weight_map.items()):
        if name not in held:
            raise UserError(f"{directory / file}: lacks tensor {name}, which {index.name} puts there")
    return FileLayout(tuple(tensors), True, metadata, index_metadata)


def _read_header(path: Path) -> tuple[list[TensorRecord], Mapping[str, str]]:
    """Records in data order and the file's metadata; the data must fill the file exactly."""
    size = path.stat().st_size
    with path.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise UserError(f"{path}: truncated or not a safetensors file: its header is incomplete")
        encoded = handle.read(length)
    try:
        header = json.loads(encoded)
        metadata = header.pop("__metadata__", {})
        fields = sorted(
            (
                int(entry["data_offsets"][0]),
                int(entry["data_offsets"][1]),
                TensorRecord(
                    str(name), path.name, str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
                ),
            )
            for name, entry in header.items()
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{path}: damaged safetensors header: {error}") from error
    position = 0
    for begin, end, record in fields:
        known = record.dtype not in DTYPES or end - begin == record.nbytes
        if begin != position or end < begin or not known:
            raise UserError(
                f"{path}: damaged safetensors header: tensor {record.name} has impossible offsets"
            )
        if 8 + length + end > size:
            raise UserError(f"{path}: truncated: tensor {record.name} ends past the end of the file")
        position = end
    if 8 + length + position != size:
        raise UserError(
            f"{path}: {size - 8 - length - position} bytes after the last tensor; the file is damaged"
        )
    return [record for _, _, record in fields], metadata
