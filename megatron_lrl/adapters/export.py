"""A training checkpoint's adapter -> a directory that peft reads, or a whole model with the adapter merged in.

CKPT_DIR (adapter.* tensors) ──┬─► adapter_config.json, adapter_model.safetensors          `export`
                               └─► base, tensor by tensor: W + scale · B A ─► HF_DIR       `export --merge`
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from megatron.core import dist_checkpointing

from megatron_lrl.adapters.adapt import AdapterSpec
from megatron_lrl.adapters.peft import write_peft
from megatron_lrl.adapters.table import PREFIX
from megatron_lrl.checkpoint import publish
from megatron_lrl.checkpoint.hf_export import checkpoint_parts, write_model
from megatron_lrl.checkpoint.manifest import (
    HF_FOLDER,
    MANIFEST_FILE,
    Manifest,
    check_same_model,
    read_checkpoint_architecture,
    read_manifest,
    require_weights,
)
from megatron_lrl.checkpoint.safetensors_io import SafetensorsReader
from megatron_lrl.checkpoint.safetensors_writer import TensorPart
from megatron_lrl.checkpoint.sources import Sources
from megatron_lrl.checkpoint.unpickling import reading_checkpoint
from megatron_lrl.checkpoint.weights import require_finite
from megatron_lrl.errors import UserError, writing
from megatron_lrl.layers.architecture import Architecture
from megatron_lrl.layers.kinds import describe_attention
from megatron_lrl.precision import accumulate_dtype
from megatron_lrl.reading import reason_of
from megatron_lrl.runtime import Runtime

_KEY = "adapter."
_PACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")


def holds_adapter(ckpt_dir: str | Path) -> bool:
    """Whether a checkpoint is an adapter's. Raises `UserError` as `read_manifest`."""
    return read_manifest(ckpt_dir).adapter is not None


def export_adapter(ckpt_dir: str | Path, target: str | Path, runtime: Runtime, merge: bool = False) -> None:
    """Write the adapter of a training checkpoint as peft does, or (``merge``) its base with it as a whole model.

    Collective. The target appears only when complete. Raises `UserError`: no adapter there, a damaged checkpoint, a
    base that is gone or of another model, a target that exists or is not writable.
    """
    ckpt_dir, target = Path(ckpt_dir), Path(target)
    arch, manifest = runtime.together(read_checkpoint_architecture, ckpt_dir)
    spec, base = runtime.together(_described, manifest, ckpt_dir)
    tensors = runtime.together(_read, ckpt_dir, spec, arch)
    runtime.together(lambda: publish.prepare(target, ckpt_dir) if runtime.is_main else None)
    try:
        if merge:
            _write_merged(arch, manifest, spec, tensors, base, target, runtime)
            return

        def write() -> None:
            if runtime.is_main:
                with writing(publish.incomplete_path(target)):
                    dtype = next(iter(tensors.values())).dtype
                    write_peft(publish.incomplete_path(target), spec, arch, str(base), tensors.items(), dtype)
                publish.publish(target)

        runtime.together(write)
    finally:
        if runtime.is_main:
            publish.discard(target)


def _described(manifest: Manifest, ckpt_dir: Path) -> tuple[AdapterSpec, Path]:
    if manifest.adapter is None:
        raise UserError(f"{ckpt_dir}: holds a model, not an adapter; export it without --merge")
    try:
        return AdapterSpec.from_dict(manifest.adapter), Path(manifest.adapter["base"])
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{ckpt_dir / MANIFEST_FILE}: damaged manifest: adapter: {reason_of(error)}"
        ) from error


def _read(ckpt_dir: Path, spec: AdapterSpec, arch: Architecture) -> dict[str, torch.Tensor]:
    """The adapter's tensors by peft's names, in table order, whole; every rank reads them."""
    wanted = {
        name: shape
        for weight in spec.weights(arch)
        for entry in (weight.a, weight.b)
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True)
    }
    with reading_checkpoint(ckpt_dir), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, about its own argument order and one process
        stored = dist_checkpointing.load_tensors_metadata(str(ckpt_dir))
        for name, shape in wanted.items():
            found = stored.get(_KEY + name)
            if found is None or tuple(found.global_shape) != tuple(shape):
                raise UserError(f"{ckpt_dir}: damaged: tensor {name} is missing or of another shape")
        request = {
            name: dist_checkpointing.ShardedTensor.from_rank_offsets(
                _KEY + name, torch.empty(shape, dtype=stored[_KEY + name].dtype)
            )
            for name, shape in wanted.items()
        }
        loaded = dist_checkpointing.load(request, str(ckpt_dir), validate_access_integrity=False)
    for name, tensor in loaded.items():
        require_finite(tensor, name, ckpt_dir)
    return {name: loaded[name] for name in wanted}


class _Deltas:
    """What the adapter adds to a tensor of the model's files."""

    def __init__(self, spec: AdapterSpec, tensors: dict[str, torch.Tensor]) -> None:
        self.spec, self.tensors = spec, tensors

    def merged(self, part: TensorPart) -> TensorPart:
        """The same part with its share of the adapter: summed in float32 or wider, rounded once."""
        packed = _PACKED.fullmatch(part.name)
        if part.part is None or packed is None:
            modules = [part.name.removesuffix(".weight")]
        else:  # one expert of a tensor that holds all: [gate; up], or down
            names = ("gate_proj", "up_proj") if packed[2] == "gate_up_proj" else ("down_proj",)
            modules = [f"{packed[1]}.{part.part}.{name}" for name in names]
        if not self.spec.modules.intersection(modules):
            return part
        wide = accumulate_dtype(part.tensor.dtype)
        whole = part.tensor.to(wide)
        rows = whole.shape[0] // len(modules)
        for number, module in enumerate(modules):
            if module in self.spec.modules:
                a, b = (self.tensors[f"{PREFIX}{module}.{x}.weight"].to(wide) for x in ("lora_A", "lora_B"))
                whole.narrow(0, number * rows, rows).add_(b @ a, alpha=self.spec.scale)
        return part._replace(tensor=whole.to(part.tensor.dtype))


def _write_merged(
    arch: Architecture,
    manifest: Manifest,
    spec: AdapterSpec,
    tensors: dict[str, torch.Tensor],
    base: Path,
    target: Path,
    runtime: Runtime,
) -> None:
    deltas = _Deltas(spec, tensors)
    with ExitStack() as stack:
        if (base / MANIFEST_FILE).is_file():
            stored = runtime.together(read_manifest, base)
            runtime.together(require_weights, stored, base)
            runtime.together(check_same_model, arch, stored, base)
            layout, carried = stored.layout, base / HF_FOLDER
            parts = checkpoint_parts(base, arch, stored, runtime)
        else:
            runtime.together(_require_same_attention, arch, manifest)
            reader = stack.enter_context(runtime.together(SafetensorsReader, base))
            sources = runtime.together(_checked, reader, arch)
            layout, carried = sources.layout(), base
            parts = _directory_parts(sources) if runtime.is_main else iter(())
        # Not a generator: it would end with the first failure, while the other ranks go on sending.
        write_model(arch, layout, carried, target, runtime, map(deltas.merged, parts))


def _require_same_attention(arch: Architecture, manifest: Manifest) -> None:
    if arch.lastkv is not None and manifest.adapter is not None:
        raise UserError(
            f"the run made its base a model of {describe_attention(arch)} while it loaded {manifest.adapter['base']}; "
            "import that with --lastkv-chunk and train on the checkpoint to be able to merge"
        )


def _checked(reader: SafetensorsReader, arch: Architecture) -> Sources:
    sources = Sources(reader, arch)
    sources.check()
    if sources.widened:
        raise UserError(
            f"{reader.directory}: its weights are FP8; `import` it and train on the checkpoint to merge"
        )
    return sources


def _directory_parts(sources: Sources) -> Iterator[TensorPart]:
    everything = (slice(None), slice(None))
    for entry in sources.entries:
        for name in entry.hf_names:
            yield TensorPart(name, sources.tensor(name, entry.part)[everything], entry.part)


__all__ = ["export_adapter", "holds_adapter"]
