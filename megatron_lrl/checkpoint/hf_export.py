"""Model parameters or gradients -> Hugging Face tensors, gathered over tp, ep and pp one at a time; and `export`.

A stage's replicas (dp x cp) hold the same weights, except that its first `ep` replicas share the experts between
them. The first replica takes part in every gather, the others of the first `ep` in those of their experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from megatron_lrl.checkpoint import publish
from megatron_lrl.checkpoint.binding import bind, expert_owner
from megatron_lrl.checkpoint.carried import stored_tensors
from megatron_lrl.checkpoint.hf_import import ep_place
from megatron_lrl.checkpoint.manifest import (
    HF_FOLDER,
    Manifest,
    read_checkpoint_architecture,
    require_weights,
)
from megatron_lrl.checkpoint.safetensors_io import FileLayout
from megatron_lrl.checkpoint.safetensors_writer import TensorPart, write_directory, write_file
from megatron_lrl.checkpoint.streaming import StreamedWeights, build_meta_model
from megatron_lrl.checkpoint.table import (
    HF_HEAD,
    Entry,
    conversion_table,
    embedding_name,
    holds_packed_experts,
    stored_shapes,
)
from megatron_lrl.checkpoint.weights import require_finite
from megatron_lrl.errors import UserError, writing
from megatron_lrl.models.build import check_layout
from megatron_lrl.models.hf_config import Architecture, describe_rope
from megatron_lrl.precision import DTYPES
from megatron_lrl.runtime import Runtime, unwrap

Get = Callable[[torch.Tensor], torch.Tensor]

# Sent ahead of a tensor, by its place in this list: only the sender knows what it is going to send.
_SENT = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


def parameter_value(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter itself: what `export` gathers."""
    return parameter.detach()


def parameter_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """The accumulated gradient: `main_grad` under Megatron's DDP, `grad` otherwise, zeros without either."""
    gradient = getattr(parameter, "main_grad", None)
    gradient = parameter.grad if gradient is None else gradient
    return torch.zeros_like(parameter) if gradient is None else gradient.detach()


def gather_hf_tensors(
    model: torch.nn.Module, arch: Architecture, runtime: Runtime, get: Get = parameter_value
) -> Iterator[tuple[str, torch.Tensor]]:
    """Full tensors with Hugging Face names, in table order, on world rank 0; other ranks get nothing.

    Collective over the world: every rank must exhaust the iterator. `get` chooses what is gathered and must be equal
    on all replicas (reduce gradients first); it is called for one parameter at a time. A tied embedding comes once,
    from the first stage. Experts are packed by layer where the files that the model was loaded from had them so.
    """
    held: dict[str, list[torch.Tensor]] = {}
    for name, tensor, part in gather_hf_parts(model, arch, runtime, get):
        if part is None:
            yield name, tensor
            continue
        held.setdefault(name, []).append(tensor)
        if arch.moe is not None and len(held[name]) == arch.moe.num_experts:
            yield name, torch.stack(held.pop(name))


def gather_hf_parts(
    model: torch.nn.Module,
    arch: Architecture,
    runtime: Runtime,
    get: Get = parameter_value,
    packed: bool | None = None,
    buffers: bool = True,
    fresh: bool = False,
    trained: bool = False,
) -> Iterator[TensorPart]:
    """As `gather_hf_tensors`, but packed experts come one by one, in their order.

    `packed`: None for the form of the files that the model was loaded from; `buffers`: with weights that are not
    trained; `fresh`: what `get` returns is nobody else's, so that it need not be copied; `trained`: an adapter's
    tensors in the place of the model's, where it has one.
    """
    ep_rank, ep_size = ep_place(runtime)
    replica = runtime.groups.expt_dp.rank() if ep_size > 1 else runtime.groups.dp_cp.rank()
    if replica:
        return
    if packed is None:
        packed = bool(getattr(unwrap(model), "packed_experts", False))
    adapters = unwrap(model).adapters if trained else None
    binding = bind(model, arch, (ep_rank, ep_size), packed) if adapters is None else adapters.binding
    local = {entry.name: parameter for entry, parameter in binding.pairs}
    held = {entry.layer if entry.layer is not None else entry.name for entry, _ in binding.pairs}
    stages = runtime.gather_objects(held, runtime.groups.pp)
    for entry in binding.entries:
        if entry.buffer and not buffers:
            continue
        place = entry.layer if entry.layer is not None else entry.name
        stage = next(stage for stage, names in enumerate(stages) if place in names)
        owner = expert_owner(entry, arch, ep_size)
        tensors = None
        if (stage, owner) == (runtime.pp_rank, ep_rank):
            tensors = _join_shards(entry, get(local[entry.name]), runtime, fresh)
        if runtime.tp_rank:
            continue
        if stage == runtime.pp_rank:
            tensors = _move(entry, tensors, owner, ep_rank, runtime.groups.ep, runtime)
        if ep_rank == 0:
            tensors = _move(entry, tensors, stage, runtime.pp_rank, runtime.groups.pp, runtime)
        if runtime.is_main and tensors is not None:
            for name in entry.hf_names:
                yield TensorPart(name, tensors.pop(0), entry.part)  # nothing here outlives its use


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
    runtime.together(require_weights, manifest, ckpt_dir)
    runtime.together(check_layout, arch, runtime.layout)
    runtime.together(lambda: publish.prepare(hf_dir, ckpt_dir) if runtime.is_main else None)
    try:
        if runtime.is_main:
            print(describe_rope(arch), flush=True)
        parts = checkpoint_parts(ckpt_dir, arch, manifest, runtime)
        write_model(arch, manifest.layout, ckpt_dir / HF_FOLDER, hf_dir, runtime, parts)
    finally:
        if runtime.is_main:
            publish.discard(hf_dir)
    return arch


def checkpoint_parts(
    ckpt_dir: Path, arch: Architecture, manifest: Manifest, runtime: Runtime
) -> Iterator[TensorPart]:
    """A checkpoint's tensors under Hugging Face names, on rank 0, for `write_model`; collective.

    The iterator gives every tensor its turn and then raises what this rank could not read.
    """
    packed = holds_packed_experts((record.name for record in manifest.layout.tensors), arch)
    model = runtime.together(build_meta_model, arch, runtime, DTYPES[manifest.dtype])
    weights = runtime.together(StreamedWeights, model, ckpt_dir)
    failure: list[Exception] = []

    def careful(parameter: torch.Tensor) -> torch.Tensor:
        """A rank that cannot read goes on in lockstep: the others are waiting for what it sends."""
        if not failure:
            try:
                return weights.read(parameter).to(runtime.device)
            except Exception as error:
                failure.append(error)
        return torch.zeros(parameter.shape, dtype=parameter.dtype, device=runtime.device)

    def parts() -> Iterator[TensorPart]:
        yield from gather_hf_parts(model, arch, runtime, careful, packed, fresh=True)
        if failure:
            raise failure[0]

    return parts()


def write_model(
    arch: Architecture,
    layout: FileLayout,
    carried_from: Path,
    hf_dir: Path,
    runtime: Runtime,
    parts: Iterator[TensorPart],
) -> None:
    """Write a model's directory in the working directory that `publish.prepare` made, and publish it; collective.

    ``carried_from``: a checkpoint's `hf/` or a model directory, with the files and tensors that travel along.
    ``parts``: taken to its end on every rank.
    """
    partial = publish.incomplete_path(hf_dir)

    def write() -> None:
        try:
            if runtime.is_main:
                bar = tqdm(total=len(layout.tensors), desc="export", unit="tensor", leave=False, delay=2)

                def counted(part: Any) -> Any:
                    bar.update()
                    return part

                # Not `tqdm(tensors)`, which would hold a tensor until the next one is there.
                given: Iterator[Any] = map(counted, parts)
                if arch.tied and any(record.name == HF_HEAD for record in layout.tensors):
                    given = _with_tied_head(given, embedding_name(arch))
                with writing(partial), stored_tensors(carried_from, layout, arch) as carried:
                    write_directory(partial, layout, chain(carried, _finite(given, carried_from.parent)))
                    publish.carry_files(carried_from, partial)
        finally:
            for _ in parts:  # every rank takes part to the end, whatever happened to the files
                pass

    runtime.together(write)
    runtime.together(lambda: publish.publish(hf_dir) if runtime.is_main else None)


def _finite(parts: Iterable[TensorPart], ckpt_dir: Path) -> Iterator[TensorPart]:
    """The same parts; raises `UserError` naming the first tensor with a value that is NaN or infinite."""
    for part in parts:
        require_finite(part[1], part[0], ckpt_dir)
        yield part


def write_hf_file(
    model: torch.nn.Module,
    arch: Architecture,
    path: str | Path,
    runtime: Runtime,
    get: Get = parameter_gradient,
    dtype: torch.dtype = torch.float32,
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write one safetensors file with Hugging Face names and shapes, gradients by default; collective.

    The file is replaced as a whole on rank 0. Returns the bytes of the largest tensor on its way there (0 on other
    ranks). Raises UserError when it cannot be written.
    """
    packed = bool(getattr(unwrap(model), "packed_experts", False))
    tensors = gather_hf_parts(model, arch, runtime, get, packed, buffers=False, trained=True)
    shapes = {name: (dtype, shape) for name, shape in stored_shapes(_trained(model, arch, packed)).items()}
    largest = 0

    def seen(part: TensorPart) -> TensorPart:
        nonlocal largest
        largest = max(largest, part.tensor.numel() * dtype.itemsize)
        return part

    def write() -> None:
        try:
            if runtime.is_main:
                write_file(path, shapes, map(seen, tensors), metadata)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error
        finally:
            for _ in tensors:  # every rank takes part to the end, whatever happened to the file
                pass

    runtime.together(write)
    return largest


def gradient_file_bytes(model: torch.nn.Module, arch: Architecture, dtype: torch.dtype) -> int:
    """What `write_hf_file` holds on rank 0 while it writes gradients: the largest tensor."""
    trained = _trained(model, arch, packed=False)
    return max(shape.numel() * dtype.itemsize for entry in trained for shape in entry.hf_shapes)


def _trained(model: torch.nn.Module, arch: Architecture, packed: bool) -> list[Entry]:
    """Entries of the parameters that have a gradient: an adapter's, or the model's."""
    if (adapters := unwrap(model).adapters) is not None:
        return list(adapters.binding.entries)
    return [entry for entry in conversion_table(arch, packed) if not entry.buffer]


def _with_tied_head(tensors: Iterator[TensorPart], embedding: str) -> Iterator[TensorPart]:
    """Give a tied embedding a second time under the head's name, as the source stored it."""
    for given in tensors:
        yield given
        if given.name == embedding:
            yield given._replace(name=HF_HEAD)
        del given


def _join_shards(
    entry: Entry, shard: torch.Tensor, runtime: Runtime, fresh: bool
) -> list[torch.Tensor] | None:
    """The entry's Hugging Face tensors on tp rank 0, None elsewhere; collective over tp."""
    group, size = runtime.groups.tp, runtime.layout.tp
    shard = shard.contiguous()
    if size == 1 or entry.op.replicated:
        return (
            None if runtime.tp_rank else entry.op.from_shards([shard] * size, entry.hf_shapes, copy=not fresh)
        )
    shards = [torch.empty_like(shard) for _ in range(size)] if runtime.tp_rank == 0 else None
    dist.gather(shard, shards, dst=dist.get_global_rank(group, 0), group=group)
    return None if shards is None else entry.op.from_shards(shards, entry.hf_shapes)


def _move(
    entry: Entry, tensors: list[torch.Tensor] | None, owner: int, rank: int, group: Any, runtime: Runtime
) -> list[torch.Tensor] | None:
    """Send an entry's tensors from rank `owner` of a group to its rank 0; None on all others.

    `rank`: this rank's place in the group. Only owner and rank 0 take part.
    """
    if owner == 0:
        return tensors if rank == 0 else None
    if rank == owner:
        assert tensors is not None
        first = dist.get_global_rank(group, 0)
        code = torch.tensor(_SENT.index(tensors[0].dtype), device=runtime.device)
        for sent in (code, *tensors):
            dist.send(sent.contiguous(), dst=first, group=group)
    if rank:
        return None
    sender = dist.get_global_rank(group, owner)
    code = torch.zeros((), dtype=torch.int64, device=runtime.device)
    dist.recv(code, src=sender, group=group)
    dtype = _SENT[int(code)]
    received = [torch.empty(shape, dtype=dtype, device=runtime.device) for shape in entry.hf_shapes]
    for tensor in received:
        dist.recv(tensor, src=sender, group=group)
    return received
