"""Streaming safetensors reader: a directory of one or many files, read slice by slice.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the
data. Headers are read and checked here, so that a damaged file is named before any weight is touched. Data is read
with plain file reads, not mapped as by safetensors' own `get_slice`: the process grows by what is asked for, and by no
page of a file that was visited, and a file that is cut while it is read is a message, not a SIGBUS.
`safetensors_writer` is the counterpart.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_lrl.errors import UserError
from megatron_lrl.outputs import GRADIENT
from megatron_lrl.reading import opened, parse_json, read_object, reason_of, shown

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
FP8 = "F8_E4M3"
# Every dtype of the format, in bits: tensors that are only carried along may have any.
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64,
    "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "C64": 64,
}  # fmt: skip
_BLOCK = 1 << 24  # bytes read at once where less than whole rows is wanted, or data is only copied
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
        """Bytes of data. Raises KeyError for a dtype that the format does not know."""
        return math.prod(self.shape) * _BITS[self.dtype] // 8

    @property
    def alignment(self) -> int:
        """Bytes of one element, at least 1: the data must start at a multiple of it."""
        return max(1, _BITS[self.dtype] // 8)


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
    """A stored tensor, or one part of it along its first axis; indexing it with slices reads those bytes only.

    Its dtype must be one of `DTYPES` or `FP8`.
    """

    def __init__(
        self, record: TensorRecord, path: Path, descriptor: int, start: int, part: int | None = None
    ) -> None:
        self.record = record
        self.dtype = torch.float8_e4m3fn if record.dtype == FP8 else DTYPES[record.dtype]
        self.shape = torch.Size(record.shape if part is None else record.shape[1:])
        self._path, self._descriptor = path, descriptor
        self._start = start + (part or 0) * math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """Slices (of step 1) of the first and of the second axis; further axes are whole."""
        if not self.shape:
            return self._read(0, torch.Size(()))
        rows, columns = (*index, slice(None), slice(None))[:2]
        first, last, _ = rows.indices(self.shape[0])
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        begin, end = (0, 0) if len(self.shape) == 1 else columns.indices(self.shape[1])[:2]
        if len(self.shape) == 1 or (begin, end) == (0, self.shape[1]):
            return self._read(first * row_bytes, torch.Size((last - first, *self.shape[1:])))
        found = torch.empty(last - first, end - begin, *self.shape[2:], dtype=self.dtype)
        step = max(1, _BLOCK // max(1, row_bytes))
        for row in range(first, last, step):
            count = min(step, last - row)
            block = self._read(row * row_bytes, torch.Size((count, *self.shape[1:])))
            found[row - first : row - first + count] = block[:, begin:end]
        return found

    def _read(self, offset: int, shape: torch.Size) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self.dtype)
        if tensor.numel():
            view = tensor.view(-1).view(torch.uint8).numpy()
            _read_into(self._descriptor, self._start + offset, memoryview(view), self._path, self.record.name)
        return tensor


def _read_into(descriptor: int, position: int, target: memoryview, path: Path, name: str) -> None:
    done = 0
    while done < len(target):
        try:
            count = os.preadv(descriptor, [target[done:]], position + done)
        except OSError as error:
            raise UserError(f"{path}: tensor {name} cannot be read: {error.strerror or error}") from error
        if count == 0:
            raise UserError(f"{path}: tensor {name} cannot be read: the file ends inside it")
        done += count


class SafetensorsReader:
    """The weights of a Hugging Face directory. Opening reads and checks all headers; use as a context
    manager.

    `file`: only the tensors of this one file of the directory, whatever its name.

    Raises:
        UserError: no weights, missing or damaged file, an index that disagrees with its files, a tensor
        stored twice.
    """

    def __init__(self, directory: str | Path, file: str | None = None) -> None:
        self.directory = Path(directory)
        if file is None:
            self.layout, self._starts = _read_layout(self.directory)
        else:
            records, metadata, self._starts = read_header(self.directory / file)
            self.layout = FileLayout(tuple(records), False, {file: metadata})
        self._records = {record.name: record for record in self.layout.tensors}
        self._descriptors: dict[str, int] = {}
        self._stack = ExitStack()

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._descriptors.clear()
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def record(self, name: str) -> TensorRecord:
        """What the headers say about a tensor; KeyError if there is none of this name."""
        return self._records[name]

    def path(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self.directory / self._records[name].file

    def tensor(self, name: str, part: int | None = None) -> LazyTensor:
        """A lazily sliceable handle of a tensor, or of a part of it along its first axis."""
        return LazyTensor(self._records[name], self.path(name), self._open(name), self._starts[name], part)

    def blocks(self, name: str) -> Iterator[memoryview]:
        """A tensor's bytes as they are stored, a bounded number at a time."""
        record, path, descriptor = self._records[name], self.path(name), self._open(name)
        buffer = memoryview(bytearray(min(_BLOCK, record.nbytes)))
        for offset in range(0, record.nbytes, _BLOCK):
            block = buffer[: min(_BLOCK, record.nbytes - offset)]
            _read_into(descriptor, self._starts[name] + offset, block, path, name)
            yield block

    def _open(self, name: str) -> int:
        """The descriptor of a tensor's file; files open on first use and stay open until the reader closes."""
        path = self.path(name)
        if path.name not in self._descriptors:
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except OSError as error:
                raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
            self._stack.callback(os.close, descriptor)
            self._descriptors[path.name] = descriptor
        return self._descriptors[path.name]


def plain_name(file: Any) -> str:
    """A file name without directory part, else ValueError: an index must not point elsewhere."""
    if not isinstance(file, str) or not file or Path(file).name != file:
        raise ValueError(f"{file!r} is not a plain file name")
    return file


def _read_layout(directory: Path) -> tuple[FileLayout, dict[str, int]]:
    """The layout, and where in its file each tensor's data starts."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if index.is_file():
        weight_map, index_metadata = _read_index(index)
        if single.is_file() and set(weight_map.values()) != {SINGLE_FILE}:
            raise UserError(
                f"{directory}: holds both {SINGLE_FILE} and an {INDEX_FILE} of other files; keep the one that is meant"
            )
        return _read_shards(directory, weight_map, index_metadata, index.name)
    if single.is_file():
        records, metadata, starts = read_header(single)
        return FileLayout(tuple(records), False, {SINGLE_FILE: metadata}), starts
    shards = _whole_set_of_shards(directory)
    weight_map = {}
    for file in shards:
        for record in read_header(directory / file)[0]:
            if record.name in weight_map:
                raise UserError(
                    f"{directory / file}: tensor {record.name} is in {weight_map[record.name]} too"
                )
            weight_map[record.name] = file
    return _read_shards(directory, weight_map, {}, "its name")


def _whole_set_of_shards(directory: Path) -> list[str]:
    """The files model-00001-of-0000N.safetensors ... of a directory that lost its index."""
    files = sorted(path.name for path in directory.glob("*.safetensors") if path.is_file())
    matches = [re.fullmatch(r"model-(\d+)-of-(\d+)\.safetensors", file) for file in files]
    shards = [match for match in matches if match is not None]
    if not shards:
        found = f"but {', '.join(files)}" if files else "only safetensors are read"
        raise UserError(f"{directory}: holds neither {SINGLE_FILE} nor {INDEX_FILE}; {found}")
    total = int(shards[0][2])
    have = [int(shard[1]) for shard in shards]
    if any(int(shard[2]) != total for shard in shards) or have != list(range(1, total + 1)):
        raise UserError(
            f"{directory}: there is no {INDEX_FILE}, and its shards are not a whole set ({', '.join(files)}): "
            f"shards 1 to {total} of {total} are needed"
        )
    return [shard[0] for shard in shards]


def _read_index(index: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """(tensor -> file, the index's own metadata)."""
    content = read_object(index)
    try:
        weight_map = {str(name): plain_name(file) for name, file in content["weight_map"].items()}
        index_metadata = dict(content.get("metadata") or {})
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"{index}: not a safetensors index (weight_map from tensor to file name): {reason_of(error)}"
        ) from error
    return weight_map, index_metadata


def _read_shards(
    directory: Path, weight_map: Mapping[str, str], index_metadata: Mapping[str, Any], index: str
) -> tuple[FileLayout, dict[str, int]]:
    """The layout of files that `index` puts the tensors in."""
    tensors: list[TensorRecord] = []
    metadata: dict[str, Mapping[str, str]] = {}
    starts: dict[str, int] = {}
    for file in sorted(set(weight_map.values())):
        path = directory / file
        if not path.is_file():
            first = min(name for name, where in weight_map.items() if where == file)
            raise UserError(f"{path}: no such file, but {index} puts tensor {first} there")
        records, metadata[file], found = read_header(path)
        starts |= found
        for record in records:
            if weight_map.get(record.name) != file:
                told = weight_map.get(record.name)
                says = f"puts it in {told}" if told else "does not name it"
                raise UserError(f"{path}: holds tensor {record.name}, but {index} {says}")
        tensors += records
    held = {record.name for record in tensors}
    for name, file in sorted(weight_map.items()):
        if name not in held:
            raise UserError(f"{directory / file}: lacks tensor {name}, which {index} puts there")
    return FileLayout(tuple(tensors), True, metadata, index_metadata), starts


def read_header(path: Path) -> tuple[list[TensorRecord], Mapping[str, str], dict[str, int]]:
    """Records in data order, the file's metadata, and where each tensor's data starts in the file.

    The data must fill the file exactly. Raises UserError on a damaged file.
    """
    with opened(path) as handle:
        size = os.fstat(handle.fileno()).st_size
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise UserError(f"{path}: truncated or not a safetensors file: its header is incomplete")
        encoded = handle.read(length)
    header = parse_json(encoded, f"{path}: damaged safetensors header", bom=False)
    try:
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise ValueError(f"__metadata__ must be an object of strings, found {shown(metadata)}")
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
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise UserError(f"{path}: damaged safetensors header: {reason_of(error)}") from error
    position = 0
    for begin, end, record in fields:
        if record.dtype not in _BITS:
            raise UserError(f"{path}: tensor {record.name} has the unknown dtype {record.dtype}")
        known = end - begin == record.nbytes
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
    if metadata.items() >= GRADIENT.items():
        raise UserError(f"{path}: holds a gradient that `grad` wrote, not a model's weights")
    starts = {record.name: 8 + length + begin for begin, _, record in fields}
    return [record for _, _, record in fields], metadata, starts
