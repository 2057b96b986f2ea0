"""A distributed checkpoint without running what it contains.

The format holds pickles: the index `.metadata`, and values beside the tensors. torch opens both with the plain
unpickler, which calls whatever they name. Here the index may name the classes of a tensor index and nothing else, and
values go through torch's weights-only unpickler, which knows tensors and plain containers. Both hold for all readers of
the process once this module is imported: Megatron-Core's too.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from megatron_lrl.errors import UserError
from megatron_lrl.reading import failures_of, read_bytes, read_object, reason_of

INDEX_FILE = ".metadata"
UNREADABLE = "cannot be read as a distributed checkpoint"
SETTINGS_FILE = "metadata.json"  # Megatron-Core's name for the format and its version
_LARGEST = 1 << 32

_INDEX = "torch.distributed.checkpoint.metadata"
_PLAN = "torch.distributed.checkpoint.planner"
_ALLOWED = {
    *(
        (_INDEX, name)
        for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex")
    ),
    *(
        (_INDEX, name)
        for name in ("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")
    ),
    # Megatron-Core stores the plan it wrote by
    *(
        (_PLAN, name)
        for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType", "BytesIOWriteData")
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *(("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath")),
    *(("pathlib._local", name) for name in ("Path", "PosixPath", "PurePosixPath")),  # Python 3.13
    *(
        ("torch", str(value).removeprefix("torch."))
        for value in vars(torch).values()
        if isinstance(value, torch.dtype)
    ),
}


class _Unpickler(pickle.Unpickler):
    """Knows the classes of an index; anything else in it is refused by name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which is no part of a checkpoint's index"
            )
        return super().find_class(module, name)


def read_index(ckpt_dir: str | Path) -> metadata.Metadata:
    """The index of a distributed checkpoint; no code of it runs.

    Raises `UserError` for an index that is missing or damaged, or that names anything but the classes of an index.
    """
    path = Path(ckpt_dir) / INDEX_FILE
    read_object(Path(ckpt_dir) / SETTINGS_FILE)
    content = read_bytes(path, _LARGEST)
    with failures_of(path, "not the index of a checkpoint"):
        index = _Unpickler(io.BytesIO(content)).load()
        if not isinstance(index, metadata.Metadata) or not isinstance(index.storage_data, dict):
            raise ValueError(f"it holds a {type(index).__name__}")
    return index


@contextmanager
def reading_checkpoint(ckpt_dir: str | Path) -> Iterator[None]:
    """Reads of a distributed checkpoint in the block: its index is looked at first, all failures are `UserError`."""
    read_index(ckpt_dir)
    with failures_of(ckpt_dir, UNREADABLE):
        yield


def _read_metadata(reader: filesystem.FileSystemReader, *args: Any, **kwargs: Any) -> metadata.Metadata:
    """`FileSystemReader.read_metadata` by `read_index`."""
    if kwargs.get("rank") is not None:
        raise UserError(f"{reader.path}: an index for each rank is not a form that is read")
    index = read_index(str(reader.path))
    if index.storage_meta is None:
        index.storage_meta = metadata.StorageMeta()
    index.storage_meta.load_id = reader.load_id
    return index


def _load_bytes(planner: DefaultLoadPlanner, read_item: Any, value: io.BytesIO) -> None:
    """`DefaultLoadPlanner.load_bytes` by torch's weights-only unpickler."""
    try:
        loaded = torch.load(value, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(f"{read_item.dest_index.fqn}: {reason_of(error)}") from error
    if planner.flatten_state_dict:
        place = planner.mappings[read_item.dest_index.fqn]
        set_element(planner.original_state_dict, place, loaded)
    else:
        planner.state_dict[read_item.dest_index.fqn] = loaded


_READERS: tuple[tuple[Any, str, Any], ...] = (
    (filesystem.FileSystemReader, "read_metadata", _read_metadata),
    (DefaultLoadPlanner, "load_bytes", _load_bytes),
)
for _owner, _name, _method in _READERS:
    setattr(_owner, _name, _method)
