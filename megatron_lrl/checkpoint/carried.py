"""Tensors that travel with a model without being part of it: vision towers, multi-token-prediction layers.

A checkpoint keeps them as they came, whatever their dtype, in one file of its `hf/` folder; `export` puts each back at
its place in the source's files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_lrl.checkpoint.safetensors_io import INDEX_FILE, SINGLE_FILE, FileLayout, SafetensorsReader
from megatron_lrl.checkpoint.safetensors_writer import Stored, write_records
from megatron_lrl.checkpoint.sources import carried_names
from megatron_lrl.errors import UserError
from megatron_lrl.models.hf_config import Architecture

CARRIED_FILE = "carried.safetensors"


def carry_tensors(source: Path, target: Path, layout: FileLayout, arch: Architecture) -> None:
    """Bring the carried tensors of a Hugging Face directory, or of a checkpoint's `hf/`, into folder `target`.

    From a checkpoint the file is linked where the file system can, else copied. Raises UserError if `source` lacks
    them.
    """
    names = set(carried_names((record.name for record in layout.tensors), arch))
    if not names:
        return
    if not any((source / file).is_file() for file in (SINGLE_FILE, INDEX_FILE)):
        _link(_file(source), target / CARRIED_FILE)
        return
    records = sorted((r for r in layout.tensors if r.name in names), key=lambda record: -record.alignment)
    with SafetensorsReader(source) as reader:
        for record in records:
            if record.name not in reader:
                raise UserError(f"{source}: tensor {record.name} is missing")
        stored = (Stored(record.name, reader.blocks(record.name)) for record in records)
        write_records(target / CARRIED_FILE, records, stored)


@contextmanager
def stored_tensors(folder: Path, layout: FileLayout, arch: Architecture) -> Iterator[Iterator[Stored]]:
    """The carried tensors of a checkpoint's `hf/` folder, or of a model directory, as stored.

    Raises:
        UserError: the file is missing or damaged, or lacks a tensor of the layout.
    """
    names = carried_names((record.name for record in layout.tensors), arch)
    if not names:
        yield iter(())
        return
    wanted = {record.name: record for record in layout.tensors}
    whole = any((folder / file).is_file() for file in (SINGLE_FILE, INDEX_FILE))
    path = folder if whole else _file(folder)
    with SafetensorsReader(folder, None if whole else CARRIED_FILE) as reader:
        for name in names:
            found = reader.record(name) if name in reader else None
            if found is None or (found.dtype, found.shape) != (wanted[name].dtype, wanted[name].shape):
                raise UserError(f"{path}: damaged: tensor {name} is missing or not what the model came with")
        yield (Stored(name, reader.blocks(name)) for name in names)


def _file(folder: Path) -> Path:
    path = folder / CARRIED_FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file; it holds the tensors that travel with the model")
    return path


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
