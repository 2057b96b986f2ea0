"""Distributed checkpoints written and read one parameter at a time, with a model that has no storage.

`import` and `export` build the model on the meta device: names, shapes, shards and Megatron-Core's sharded state
dict are real, values are not. A tensor of that state dict is a view of some parameter; what it would hold is found
by applying the same view to the parameter's values, which come when the tensor is written (`save_streamed`), or go
when it is read (`StreamedWeights`). The files are Megatron-Core's `dist_checkpointing` format and load in any layout.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.futures import Future
from tqdm import tqdm

from megatron_lrl import platform_cpu
from megatron_lrl.checkpoint.unpickling import UNREADABLE, reading_checkpoint
from megatron_lrl.checkpoint.weights import FAILURES, weights_state_dict
from megatron_lrl.errors import UserError
from megatron_lrl.models.build import PolicyModel, build_model
from megatron_lrl.models.hf_config import Architecture
from megatron_lrl.models.meta import META, OnMeta
from megatron_lrl.precision import Precision
from megatron_lrl.reading import failures_of
from megatron_lrl.runtime import Runtime, unwrap

platform_cpu.install()

import torch.distributed.checkpoint as dcp  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import apply_factories  # noqa: E402
from megatron.core.dist_checkpointing.strategies.torch import (  # noqa: E402
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import (  # noqa: E402
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: E402
from torch.distributed.checkpoint.planner import (  # noqa: E402
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult  # noqa: E402

Values = Callable[[torch.Tensor], torch.Tensor]  # a parameter of the meta model -> its values


def build_meta_model(arch: Architecture, runtime: Runtime, dtype: torch.dtype) -> PolicyModel:
    """This rank's stage of the model without storage. Raises `UserError` as `build_model`."""
    with OnMeta():
        return build_model(arch, replace(runtime, device=META), Precision(dtype))


def save_streamed(model: torch.nn.Module, directory: Path, runtime: Runtime, values: Values) -> None:
    """Write the weights of a meta model into an existing directory; collective.

    `values` is called for each parameter whose shard this rank writes, in the order of writing, and asked again for
    one that is written in parts with others in between; it must return the same each time.

    Raises:
        UserError: what `values` raised, on all ranks.
    """
    runtime.barrier()
    try:
        dist_checkpointing.save(
            {"model": weights_state_dict(model)},
            str(directory),
            sharded_strategy=Strategy(_Views(model, values, runtime.is_main)),
        )
    except FAILURES as error:
        raise UserError(_first_message(error, directory)) from error


def _first_message(error: BaseException, directory: Path) -> str:
    failures = getattr(error, "failures", None) or {}
    cause: BaseException = next((failure for failure, _ in failures.values()), error)
    if isinstance(cause, OSError):
        return f"{directory}: cannot be written: {cause.strerror or cause}"
    return str(cause) or type(cause).__name__


class Live:
    """What a tensor of a state dict holds, on its way into a file: itself, moved to the host."""

    def __init__(self) -> None:
        self.beside = 0  # bytes that values on their way take on the host now, beside what they are made from
        self.peak = 0  # the most that it was, the writer's copies included

    def in_turn(self, items: Sequence[Any], tensor_of: Callable[[Any], Any]) -> Generator[Any]:
        """The items in the order in which their values come; `tensor_of` gives an item's part of the state dict."""
        yield from items

    def of(self, view: torch.Tensor) -> torch.Tensor:
        self.beside = 0 if view.device.type == "cpu" else view.nbytes
        return view.detach().cpu()

    def forget(self) -> None: ...

    def finish(self) -> None:
        """Gives other ranks what they still wait for; called whatever became of the file."""


class _Views(Live):
    """What a tensor of the meta model's state dict would hold; remembers the last parameter's values."""

    def __init__(self, model: torch.nn.Module, values: Values, shows: bool) -> None:
        super().__init__()
        core = unwrap(model)
        tensors = (*core.parameters(), *core.buffers())
        self._owners = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
        self._values = values
        self._bar = tqdm(
            total=len(self._owners), desc="import", unit="tensor", leave=False, delay=2, disable=not shows
        )
        self._last: tuple[int, torch.Tensor] | None = None

    def of(self, view: torch.Tensor) -> torch.Tensor:
        key = view.untyped_storage()._cdata
        owner = self._owners[key]
        if self._last is None or self._last[0] != key:
            self._last = None  # freed before the next one comes
            self._bar.update()
            found = self._values(owner).to("cpu", owner.dtype).contiguous()
            if found.shape != owner.shape:
                raise ValueError(f"values of shape {tuple(found.shape)} for a parameter {tuple(owner.shape)}")
            self._last, self.beside = (key, found), found.nbytes
        return self._last[1].as_strided(view.shape, view.stride(), view.storage_offset())

    def forget(self) -> None:
        self._last = None
        self._bar.close()


class _Planner(MCoreSavePlanner):
    """Megatron-Core's, with values put in when an item is written."""

    def __init__(self, views: Live) -> None:
        super().__init__(
            dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False
        )
        self.views = views

    def transform_object(self, write_item: Any, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        return found if write_item.type == WriteItemType.BYTE_IO else self.views.of(found)


class _Writer(FileSystemWriter):
    """torch's writer keeps the tensors it wrote until its file is complete; this one keeps none."""

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        results, views = [], planner.views
        try:
            with (Path(self.path) / name).open("wb") as stream:
                for item in views.in_turn(plan.items, lambda item: planner.lookup_object(item.index)):
                    start = stream.tell()
                    found = planner.resolve_data(item)
                    if item.type == WriteItemType.BYTE_IO:
                        stream.write(found.getbuffer())
                    else:  # a view would be saved with the whole storage behind it
                        whole = found.untyped_storage().nbytes() == found.nbytes
                        views.peak = max(views.peak, views.beside + (0 if whole else found.nbytes))
                        torch.save(found if whole else found.clone(), stream)
                    del found  # before the next parameter's values come
                    length = stream.tell() - start
                    results.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
                views.forget()
                stream.flush()
                os.fsync(stream.fileno())
        finally:
            views.finish()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


class Strategy(TorchDistSaveShardedStrategy):
    """Megatron-Core's format through the planner and the writer above: no tensor has a second copy but the one on its
    way."""

    def __init__(self, views: Live) -> None:
        super().__init__()
        self.views = views

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        dcp.save(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=_Writer(checkpoint_dir, single_file_per_rank=True, thread_count=1),
            planner=_Planner(self.views),
        )


class StreamedWeights:
    """A distributed checkpoint, read for a meta model one parameter at a time, each rank for itself.

    Raises:
        UserError: the directory is not a distributed checkpoint.
    """

    def __init__(self, model: torch.nn.Module, ckpt_dir: str | Path) -> None:
        self._directory = ckpt_dir
        self._shards: dict[int, list[ShardedTensor]] = {}
        state = weights_state_dict(model)
        core = unwrap(model)
        names = dict(core.named_parameters()) | dict(core.named_buffers())
        for name, value in state.items():
            held = {"it": value}
            apply_factories(held)
            if name in names:
                self._shards[id(names[name])] = list(nested_values(held))
        with reading_checkpoint(ckpt_dir):
            self._reader = FileSystemReader(ckpt_dir)
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, False)
        self._chunks = {
            key: {(tuple(chunk.offsets), tuple(chunk.sizes)): i for i, chunk in enumerate(found.chunks)}
            for key, found in self._metadata.state_dict_metadata.items()
            if hasattr(found, "chunks")
        }

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """The values of one parameter of the meta model, in host memory and the parameter's dtype.

        Raises:
            UserError: the checkpoint lacks the tensor or a part of it, or cannot be read.
        """
        # rows that pad the vocabulary here may not exist there
        values = torch.zeros(parameter.shape, dtype=parameter.dtype, device="cpu")
        for shard in self._shards[id(parameter)]:
            meta = shard.data
            target = values.as_strided(meta.shape, meta.stride(), meta.storage_offset())
            for _ in range(shard.prepend_axis_num):
                target = target.unsqueeze(0)
            covered = self._read_region(shard.key, tuple(shard.global_offset), target)
            if covered != target.numel() and not shard.allow_shape_mismatch:
                raise UserError(f"{self._directory}: holds only a part of tensor {shard.key}")
        return values

    def _read_region(self, key: str, offset: tuple[int, ...], target: torch.Tensor) -> int:
        """Fill `target` with the elements of tensor `key` from `offset` on; returns how many there are."""
        if key not in self._chunks:
            raise UserError(f"{self._directory}: tensors missing or left over: {key}")
        chunks = self._chunks[key]
        exact = chunks.get((offset, tuple(target.shape)))
        found = (
            [(offset, tuple(target.shape), exact)]
            if exact is not None
            else [(*c, i) for c, i in chunks.items()]
        )
        covered, items, views = 0, [], []
        for start, sizes, number in found:
            low = [max(a, b) for a, b in zip(start, offset, strict=True)]
            high = [min(a + m, b + n) for a, m, b, n in zip(start, sizes, offset, target.shape, strict=True)]
            lengths = torch.Size(b - a for a, b in zip(low, high, strict=True) if b > a)
            if len(lengths) < len(low):
                continue
            into = [a - b for a, b in zip(low, offset, strict=True)]
            items.append(
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(key, torch.Size(offset)),
                    dest_offsets=torch.Size(into),
                    storage_index=MetadataIndex(key, torch.Size(start), number),
                    storage_offsets=torch.Size(a - b for a, b in zip(low, start, strict=True)),
                    lengths=lengths,
                )
            )
            view = target
            for axis, (begin, length) in enumerate(zip(into, lengths, strict=True)):
                view = view.narrow(axis, begin, length)
            views.append(view)
            covered += math.prod(lengths)
        for item, view in zip(items, views, strict=True):
            with failures_of(self._directory, UNREADABLE):
                self._reader.read_data(LoadPlan([item]), _Target(view))
        return covered


class _Target(dcp.DefaultLoadPlanner):
    """What torch's reader asks a load planner for: where an item goes."""

    def __init__(self, view: torch.Tensor) -> None:
        super().__init__()
        self._view = view

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self._view

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None: ...
