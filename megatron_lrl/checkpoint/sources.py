"""The weights of a Hugging Face directory as the conversion tables see them.

Hides how a directory stores them: routed experts one by one or packed by layer, FP8 weights with a scale per block
(value = stored * scale, here widened to bfloat16), tensors that are only carried along. Everything is read slice by
slice.

FP8: `X` is stored as F8_E4M3 [..., out, in] and `X_scale_inv` as [..., ceil(out / 128), ceil(in / 128)].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce

import torch

from megatron_lrl.checkpoint.safetensors_io import (
    DTYPES,
    FP8,
    FileLayout,
    LazyTensor,
    SafetensorsReader,
    TensorRecord,
)
from megatron_lrl.checkpoint.table import (
    HF_HEAD,
    Entry,
    check_names,
    conversion_table,
    embedding_name,
    holds_packed_experts,
    is_carried,
    is_recomputed,
    stored_shapes,
)
from megatron_lrl.errors import UserError
from megatron_lrl.layers.conversion import Sliceable
from megatron_lrl.models.hf_config import Architecture
from megatron_lrl.precision import DTYPES as RUN_DTYPES

BLOCK = 128  # rows and columns that share an FP8 scale
_SCALE = "_scale_inv"
_ROWS = 8 * BLOCK  # rows widened at once
_COMPARED_ROWS = 4096  # rows of embedding and head held at once while comparing them


class Sources:
    """The tensors of an open directory that make up model `arch`.

    Attributes:
        packed: routed experts are packed by layer.
        entries: the conversion table in this form.
    """

    def __init__(self, reader: SafetensorsReader, arch: Architecture) -> None:
        self.reader, self.arch = reader, arch
        names = [record.name for record in reader.layout.tensors]
        self.packed = holds_packed_experts(names, arch)
        self.entries = conversion_table(arch, self.packed)
        mapped = {name for entry in self.entries for name in entry.hf_names}
        matrices = {
            n for e in self.entries for n, s in zip(e.hf_names, e.hf_shapes, strict=True) if len(s) == 2
        }
        self._scaled = {name for name in matrices if name in reader and reader.record(name).dtype == FP8}
        self._scales = {
            name for name in names if name.endswith(_SCALE) and name.removesuffix(_SCALE) in mapped
        }

    @property
    def widened(self) -> bool:
        """Whether some weights are FP8 in the files."""
        return bool(self._scaled)

    def shard(self, entry: Entry, tp_rank: int, tp_size: int) -> torch.Tensor:
        """A tp rank's parameter, in the narrowest dtype that holds its sources.

        Raises `UserError` naming file and tensor if a value is NaN or infinite.
        """
        sources = [self.tensor(name, entry.part) for name in entry.hf_names]
        shard = entry.op.to_shard(sources, tp_rank, tp_size, entry.width)
        if not torch.isfinite(shard).all():
            everything = (slice(None),) * len(entry.hf_shapes[0])
            found = zip(entry.hf_names, sources, strict=True)
            name = next(n for n, source in found if not torch.isfinite(source[everything]).all())
            raise UserError(f"{self.reader.path(name)}: tensor {name} holds values that are NaN or infinite")
        return shard

    def tensor(self, name: str, part: int | None = None) -> Sliceable:
        """A source tensor, or part of one along its first axis, to be sliced."""
        tensor = self.reader.tensor(name, part)
        if name not in self._scaled:
            return tensor
        return _BlockScaled(tensor, self.reader.tensor(name + _SCALE, part))

    def layout(self) -> FileLayout:
        """The files that `export` will write: without recomputed buffers, FP8 weights as bfloat16."""
        layout = self.reader.layout
        dropped = [record.name for record in layout.tensors if is_recomputed(record.name)]
        if not self.widened:
            return layout.without(dropped)
        kept = layout.without([*dropped, *self._scales])
        wide = [replace(r, dtype="BF16") if r.name in self._scaled else r for r in kept.tensors]
        files = dict.fromkeys(record.file for record in wide)
        # data starts at multiples of the element size, which descending sizes keep
        tensors = [
            r
            for file in files
            for r in sorted((r for r in wide if r.file == file), key=lambda r: -r.alignment)
        ]
        metadata = {name: values for name, values in kept.metadata.items() if name in files}
        totals = dict(kept.index_metadata)
        if "total_size" in totals:
            totals["total_size"] = sum(record.nbytes for record in tensors)
        return FileLayout(tuple(tensors), kept.indexed, metadata, totals)

    def dtype(self) -> str:
        """The narrowest parameter dtype (a key of `precision.DTYPES`) that holds the model's tensors exactly.

        Those that the model keeps in float32 anyway have no say.
        """
        wide = {name for entry in self.entries if entry.wide for name in entry.hf_names}
        names = [name for entry in self.entries for name in entry.hf_names if name not in wide]
        if self.arch.tied and HF_HEAD in self.reader:
            names.append(HF_HEAD)
        found = reduce(torch.promote_types, {self._dtype_of(name) for name in names})
        if found == torch.float16:  # models do not compute in float16
            found = torch.float32
        return next(name for name, dtype in RUN_DTYPES.items() if dtype == found)

    def _dtype_of(self, name: str) -> torch.dtype:
        return torch.bfloat16 if name in self._scaled else DTYPES[self.reader.record(name).dtype]

    def check(self, compare_tied_head: bool = True) -> None:
        """Hold names, shapes and dtypes against the conversion table.

        Raises:
            UserError: naming file and tensor: missing, left over, of another shape or dtype, an FP8 weight without
                its scales or scales without their weight; a stored head of a tied model that differs from the
                embedding.
        """
        reader, arch = self.reader, self.arch
        found = [record.name for record in reader.layout.tensors if record.name not in self._scales]
        check_names(self.entries, found, arch, str(reader.directory))
        for name, shape in stored_shapes(self.entries).items():
            self._check_tensor(name, shape)
        for name in sorted(self._scales):
            if name.removesuffix(_SCALE) not in self._scaled:
                raise UserError(
                    f"{reader.path(name)}: tensor {name} scales {name.removesuffix(_SCALE)}, which is not {FP8}"
                )
        if arch.tied and HF_HEAD in reader:
            self._check_tensor(HF_HEAD, torch.Size((arch.vocab_size, arch.hidden_size)))
            if compare_tied_head:
                self._compare_tied_head()

    def _check_tensor(self, name: str, shape: torch.Size) -> None:
        record = self.reader.record(name)
        self._check_shape(record, shape)
        if name in self._scaled:
            if name + _SCALE not in self.reader:
                raise UserError(
                    f"{self.reader.path(name)}: tensor {name} is {FP8}, but its scales {name + _SCALE} are missing"
                )
            blocks = torch.Size((*shape[:-2], *(-(-n // BLOCK) for n in shape[-2:])))
            self._check_shape(self.reader.record(name + _SCALE), blocks)
            record = self.reader.record(name + _SCALE)
        if record.dtype not in DTYPES:
            valid = ", ".join(DTYPES)
            raise UserError(
                f"{self.reader.path(record.name)}: tensor {record.name} has dtype {record.dtype}; valid: {valid}"
            )

    def _check_shape(self, record: TensorRecord, shape: torch.Size) -> None:
        if record.shape != tuple(shape):
            raise UserError(
                f"{self.reader.path(record.name)}: tensor {record.name} has shape {list(record.shape)}; "
                f"config.json asks for {list(shape)}"
            )

    def _compare_tied_head(self) -> None:
        name, vocab = embedding_name(self.arch), self.arch.vocab_size
        embedding, head = self.tensor(name), self.tensor(HF_HEAD)
        if self.reader.record(name).dtype == self.reader.record(HF_HEAD).dtype:
            chunks = (slice(i, min(i + _COMPARED_ROWS, vocab)) for i in range(0, vocab, _COMPARED_ROWS))
            if all(torch.equal(embedding[(rows,)], head[(rows,)]) for rows in chunks):
                return
        raise UserError(
            f"{self.reader.path(HF_HEAD)}: tensor {HF_HEAD} differs from {name}, but config.json says "
            "tie_word_embeddings = true"
        )


def carried_names(names: Iterable[str], arch: Architecture) -> list[str]:
    """Those of a directory's tensors that are carried along, in their order."""
    mapped = {name for entry in conversion_table(arch) for name in entry.hf_names}
    return [name for name in names if name not in mapped and is_carried(name, arch)]


class _BlockScaled:
    """An FP8 weight [out, in] and its scales; slices come out as bfloat16."""

    def __init__(self, weight: LazyTensor, scales: LazyTensor) -> None:
        self._weight, self._scales = weight, scales

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        rows, columns = (*index, slice(None), slice(None))[:2]
        first, last, _ = rows.indices(self._weight.shape[0])
        begin, end, _ = columns.indices(self._weight.shape[1])
        widened = torch.empty(last - first, end - begin, dtype=torch.bfloat16)
        for row in range(first, last, _ROWS):
            stop = min(row + _ROWS, last)
            values = self._weight[(slice(row, stop), slice(begin, end))].float()
            blocks = (slice(row // BLOCK, -(-stop // BLOCK)), slice(begin // BLOCK, -(-end // BLOCK)))
            scales = self._scales[blocks].float()[
                torch.arange(row, stop)[:, None] // BLOCK - blocks[0].start,
                torch.arange(begin, end) // BLOCK - blocks[1].start,
            ]
            widened[row - first : stop - first] = values * scales
        return widened
