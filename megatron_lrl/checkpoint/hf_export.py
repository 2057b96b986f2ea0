"""Model parameters or gradients -> Hugging Face tensors, gathered over tp and pp one at a time; and
`export`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_lrl.checkpoint import publish
from megatron_lrl.checkpoint.binding import bind
from megatron_lrl.checkpoint.manifest import HF_FOLDER, read_checkpoint_architecture
from megatron_lrl.checkpoint.safetensors_io import FileLayout
from megatron_lrl.checkpoint.safetensors_writer import write_directory, write_file
from megatron_lrl.checkpoint.table import HF_EMBEDDING, HF_HEAD, Entry, conversion_table
from megatron_lrl.checkpoint.weights import load_weights
from megatron_lrl.errors import UserError
from megatron_lrl.models.build import build_model, check_layout
from megatron_lrl.models.hf_config import Architecture, describe_rope
from megatron_lrl.runtime import DTYPES, Runtime

Get = Callable[[torch.nn.Parameter], torch.Tensor]


def parameter_value(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The parameter itself: what `export` gathers."""
    return parameter.detach()


def parameter_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The accumulated gradient: `main_grad` under Megatron's DDP, `grad` otherwise, zeros without either."""
    gradient = getattr(parameter, "main_grad", None)
    gradient = parameter.grad if gradient is None else gradient
    return torch.zeros_like(parameter) if gradient is None else gradient.detach()


def gather_hf_tensors(
    model: torch.nn.Module, arch: Architecture, runtime: Runtime, get: Get = parameter_value
) -> Iterator[tuple[str, torch.Tensor]]:
    """Full tensors with Hugging Face names, in table order, on world rank 0; other ranks get nothing.

    Collective over the tp and pp groups of the first data- and context-parallel replica: every rank must
    exhaust the iterator. `get` chooses what is gathered and must be equal on all replicas (reduce gradients
    first). A tied embedding comes once, from the first stage.
    """
    if runtime.dp_rank or runtime.cp_rank:
        return
    binding = bind(model, arch)
    local = {entry.name: get(parameter) for entry, parameter in binding.pairs}
    dtypes: list[dict[str, torch.dtype]] = runtime.gather_objects(
        {name: tensor.dtype for name, tensor in local.items()}, runtime.groups.pp
    )
    for entry in binding.entries:
        stage = next(stage for stage, names in enumerate(dtypes) if entry.name in names)
        tensors = _join_shards(entry, local[entry.name], runtime) if stage == runtime.pp_rank else None
        if runtime.tp_rank:
            continue
        if stage != 0:
            tensors = _move_to_first_stage(entry, tensors, dtypes[stage][entry.name], stage, runtime)
        if runtime.is_main and tensors is not None:
            yield from zip(entry.hf_names, tensors, strict=True)


def export_checkpoint(ckpt_dir: str | Path, hf_dir: str | Path, runtime: Runtime) -> Architecture:
    """Write a checkpoint as a Hugging Face directory: the source's files, names, dtypes and carried files;
    collective.

    Weights that were not changed since `import` come out bit-equal. The directory appears only when complete.

    Raises:
        UserError: no or damaged checkpoint, a layout that does not fit, a target that exists or is not
        writable.
    """
    ckpt_dir, hf_dir = Path(ckpt_dir), Path(hf_dir)
    arch, manifest = runtime.together(read_checkpoint_architecture, ckpt_dir)
    runtime.together(check_layout, arch, runtime.layout)
    runtime.together(lambda: publish.prepare(hf_dir) if runtime.is_main else None)
    try:
        if runtime.is_main:
            print(describe_rope(arch), flush=True)
        model = build_model(arch, runtime, DTYPES[manifest.dtype])
        load_weights(model, ckpt_dir, runtime)
        write_hf_directory(model, arch, manifest.layout, ckpt_dir / HF_FOLDER, hf_dir, runtime)
    finally:
        if runtime.is_main:
            publish.discard(hf_dir)
    return arch


def write_hf_directory(
    model: torch.nn.Module,
    arch: Architecture,
    layout: FileLayout,
    carried_from: Path,
    hf_dir: Path,
    runtime: Runtime,
) -> None:
    """Gather `model` into the working directory that `publish.prepare` made, and publish it; collective."""
    tensors = gather_hf_tensors(model, arch, runtime)
    partial = publish.incomplete_path(hf_dir)

    def write() -> None:
        if not runtime.is_main:
            for _ in tensors:
                pass
            return
        stored_head = arch.tied and any(record.name == HF_HEAD for record in layout.tensors)
        try:
            write_directory(partial, layout, _with_tied_head(tensors) if stored_head else tensors)
        except Exception:
            for _ in tensors:  # the other ranks are still sending
                pass
            raise
        publish.carry_files(carried_from, partial)
        publish.publish(hf_dir)

    runtime.together(write)


def write_hf_file(
    model: torch.nn.Module,
    arch: Architecture,
    path: str | Path,
    runtime: Runtime,
    get: Get = parameter_gradient,
    dtype: torch.dtype = torch.float32,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one safetensors file with Hugging Face names and shapes, gradients by default; collective.

    The file is replaced as a whole on rank 0. Raises UserError when it cannot be written.
    """
    tensors = gather_hf_tensors(model, arch, runtime, get)
    shapes = {
        name: (dtype, shape)
        for entry in conversion_table(arch)
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True)
    }

    def write() -> None:
        try:
            if runtime.is_main:
                write_file(path, shapes, tensors, metadata)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error
        finally:
            for _ in tensors:  # every rank takes part to the end, whatever happened to the file
                pass

    runtime.together(write)


def _with_tied_head(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Give a tied embedding a second time under the head's name, as the source stored it."""
    for name, tensor in tensors:
        yield name, tensor
        if name == HF_EMBEDDING:
            yield HF_HEAD, tensor


def _join_shards(entry: Entry, shard: torch.Tensor, runtime: Runtime) -> list[torch.Tensor] | None:
    """The entry's Hugging Face tensors on tp rank 0, None elsewhere; collective over tp."""
    group, size = runtime.groups.tp, runtime.layout.tp
    shard = shard.contiguous()
    if size == 1 or entry.op.replicated:
        return None if runtime.tp_rank else entry.op.from_shards([shard] * size, entry.hf_shapes)
    shards = [torch.empty_like(shard) for _ in range(size)] if runtime.tp_rank == 0 else None
    dist.gather(shard, shards, dst=dist.get_global_rank(group, 0), group=group)
    return None if shards is None else entry.op.from_shards(shards, entry.hf_shapes)


def _move_to_first_stage(
    entry: Entry, tensors: list[torch.Tensor] | None, dtype: torch.dtype, stage: int, runtime: Runtime
) -> list[torch.Tensor] | None:
    """Send from the owning stage to the first one, both on tp rank 0; None on every stage but the first."""
    group = runtime.groups.pp
    if tensors is not None:
        for tensor in tensors:
            dist.send(tensor, dst=dist.get_global_rank(group, 0), group=group)
        return None
    if runtime.pp_rank:
        return None
    received = [torch.empty(shape, dtype=dtype, device=runtime.device) for shape in entry.hf_shapes]
    for tensor in received:
        dist.recv(tensor, src=dist.get_global_rank(group, stage), group=group)
    return received
