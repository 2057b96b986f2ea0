"""Training checkpoints: a run saved whole, resumed bit-equal in its layout and exactly in any other.

    output/checkpoints/update-000010/
        *.distcp .metadata …     weights, optimizer state and random states (dist_checkpointing)
        megatron_lrl.json, hf/   as `import` writes them: `export` and `model.checkpoint` read the weights
        training.json            step counts, layout, dtype, the caller's progress
        complete.json            every file's size and SHA-256, written last

A checkpoint is built in a hidden sibling directory and renamed when all ranks have finished.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_lrl.checkpoint import publish
from megatron_lrl.checkpoint.completion import (
    COMPLETION_FILE,
    check_completion,
    read_json,
    write_completion,
    write_json,
)
from megatron_lrl.checkpoint.hf_import import load_checkpoint_weights, source_manifest
from megatron_lrl.checkpoint.lastkv import converted, has_gates
from megatron_lrl.checkpoint.manifest import (
    HF_FOLDER,
    MANIFEST_FILE,
    Manifest,
    check_same_model,
    read_manifest,
    write_manifest,
)
from megatron_lrl.checkpoint.optimizer_state import (
    Whole,
    load_optimizer_state,
    optimizer_step,
    prime,
)
from megatron_lrl.checkpoint.rng_state import pack_rng, unpack_rng
from megatron_lrl.checkpoint.streaming import Strategy
from megatron_lrl.checkpoint.weights import FAILURES, weights_state_dict
from megatron_lrl.errors import UserError
from megatron_lrl.models.hf_config import Architecture, read_architecture
from megatron_lrl.reading import failures_of
from megatron_lrl.runtime import Runtime, unwrap
from megatron_lrl.settings import Config

from megatron.core import dist_checkpointing  # isort: skip  # after weights, which installs the CPU platform

TRAINING_FILE = "training.json"
FORMAT_VERSION = 1
CHECKPOINTS = "checkpoints"
_NAME = re.compile(r"update-(\d{6,})")
_OURS = {TRAINING_FILE, COMPLETION_FILE, MANIFEST_FILE}
_ERRNO = re.compile(r"\[Errno \d+\] ([^:]+)")
_CUT_SHORT = "unexpected pos"  # of torch's archive writer: fewer bytes stand in the file than were written
_WHAT = "a training checkpoint, written by `train`"


class TrainableRun(Protocol):
    """What is saved and resumed: `lifetimes.run.Run`, opened with an optimizer."""

    config: Config
    runtime: Runtime
    arch: Architecture
    model: Any
    optimizer: Any
    scheduler: Any
    version: int


def training_path(output_dir: str | Path, update: int) -> Path:
    """Where the checkpoint after `update` updates belongs."""
    return Path(output_dir) / CHECKPOINTS / f"update-{update:06d}"


def save_training(
    run: TrainableRun, directory: str | Path, progress: Mapping[str, Any], keep: int | None = 2
) -> int:
    """Write the run as a training checkpoint; collective. `directory` appears only when it is complete.

    Returns the bytes of host memory that this rank's part took at its peak, beside the run.

    Args:
        progress: JSON values, given back by `load_training`: update number, data position, settings.
        keep: of the complete checkpoints `update-*` beside `directory`, this many of the newest up to it
            stay; None keeps all. Damaged ones and the one that `model.checkpoint` names are never deleted.

    Raises:
        UserError: `directory` holds a complete checkpoint or something else (a damaged checkpoint is moved to
            `<name>.damaged`), it cannot be written, or the model's source directory is gone.
        ValueError, TypeError: `progress` is not JSON, `keep` < 1, or the run has no optimizer.
    """
    directory, runtime = Path(directory), run.runtime
    _check_run(run)
    if keep is not None and keep < 1:
        raise ValueError(f"keep = {keep}; at least the checkpoint just written stays")
    content = json.loads(json.dumps(progress, allow_nan=False))
    runtime.together(lambda: _prepare(directory) if runtime.is_main else None)
    partial = publish.incomplete_path(directory)
    try:
        source = runtime.together(lambda: _source(run) if runtime.is_main else None)
        prime(run.optimizer)
        rng = pack_rng(runtime)
        training = {
            "format_version": FORMAT_VERSION,
            "model_version": run.version,
            "optimizer_step": optimizer_step(run.optimizer, runtime),
            "scheduler_steps": int(run.scheduler.num_steps),
            "dtype": run.config.model.dtype,
            "layout": {**asdict(runtime.layout), "world": runtime.world_size},
            "rng_bytes": max(runtime.gather_objects(len(rng))),
            "progress": content,
        }
        taken = runtime.together(_write_shards, run, partial, rng, training["rng_bytes"])

        def describe() -> None:
            if source is not None:
                write_manifest(partial, *source, run.arch)
                write_json(partial / TRAINING_FILE, training)

        runtime.together(_writing(describe, directory))
        write_completion(partial, runtime)
        runtime.together(lambda: publish.publish(directory) if runtime.is_main else None)
    finally:
        if runtime.is_main:
            publish.discard(directory)
    if runtime.is_main and keep is not None:
        _retain(directory, keep, run.config.model.checkpoint)
    runtime.barrier()
    return taken


def read_progress(directory: str | Path) -> dict[str, Any]:
    """The `progress` that a checkpoint was saved with, from its small files. Raises `UserError`."""
    return dict(_read_training(Path(directory))["progress"])


def load_training(run: TrainableRun, directory: str | Path, checked: bool = False) -> dict[str, Any]:
    """Resume a run from a training checkpoint of any layout; collective. Returns the saved `progress`.

    Weights, master weights, moments, step counts and the model version are those of the saved run; the
    learning rate follows from the step count and this run's settings. Random states are restored in the
    layout they were saved in; in another one the ranks keep theirs. The model version moves on, so that no
    prefix captured before the load passes for current. ``checked``: `latest_training` has just read all of it.

    Raises:
        UserError: naming the file that is missing or damaged, or saying what differs: another model, another
            model.dtype.
        ValueError: the run has no optimizer.
    """
    directory, runtime = Path(directory), run.runtime
    _check_run(run)
    training = runtime.together(_read_training, directory)
    if not checked:
        check_completion(directory, runtime)
    manifest = runtime.together(read_manifest, directory)
    runtime.together(check_same_model, run.arch, manifest, directory)
    if training["dtype"] != run.config.model.dtype:
        raise UserError(
            f"{directory}: saved with model.dtype = {training['dtype']!r}, this run has "
            f"{run.config.model.dtype!r}; resume with the same, or start from it with model.checkpoint"
        )
    load_checkpoint_weights(run.model, run.arch, directory, runtime)
    runtime.together(_read_shards, run, directory, training)
    run.scheduler.num_steps = 0
    run.scheduler.step(increment=training["scheduler_steps"])
    run.version = max(training["model_version"], run.version + 1)
    return dict(training["progress"])


def latest_training(output_dir: str | Path, runtime: Runtime | None = None) -> Path | None:
    """The newest complete checkpoint of an output folder, None if there is none.

    Checkpoints that were interrupted or damaged are skipped, and named in a printed line each: every file of a
    candidate is read. With a `runtime` the call is collective and the ranks share that work; rank 0 lists the
    candidates.
    """
    if runtime is None:
        return next((path for path in _candidates(Path(output_dir)) if _usable(path, None)), None)
    listed = runtime.together(lambda: _candidates(Path(output_dir)) if runtime.is_main else [])
    candidates = runtime.gather_objects(listed)[0]
    return next((path for path in candidates if _usable(path, runtime)), None)


def _candidates(output_dir: Path) -> list[Path]:
    """Checkpoints that may be complete, newest first; interrupted ones are named."""
    folder = output_dir / CHECKPOINTS
    if not folder.is_dir():
        return []
    for path in sorted(folder.glob(".update-*.incomplete")):
        print(f"skipped {path}: writing it was interrupted", flush=True)
    return _checkpoints(folder)[::-1]


def _usable(path: Path, runtime: Runtime | None) -> bool:
    """Whether every file of a checkpoint is as it was written; collective with a `runtime`."""

    def read() -> None:
        _read_training(path)
        read_manifest(path)

    try:
        read() if runtime is None else runtime.together(read)
        check_completion(path, runtime, whole=True)
    except UserError as error:
        if runtime is None or runtime.is_main:
            print(f"skipped {path}: {error}", flush=True)
        return False
    return True


def _checkpoints(folder: Path) -> list[Path]:
    """Directories named `update-<number>`, oldest first."""
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_update)


def _update(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _check_run(run: TrainableRun) -> None:
    if run.optimizer is None or run.scheduler is None:
        raise ValueError("only a run with an optimizer has training state: open_run(..., optimizer=True)")


def _prepare(directory: Path) -> None:
    """Make the working directory; a damaged checkpoint in the place is moved aside."""
    if directory.is_dir() and _OURS & {path.name for path in directory.iterdir()}:
        try:
            check_completion(directory)
        except UserError as error:
            aside = directory.with_name(directory.name + ".damaged")
            print(f"moved {directory} to {aside.name}: {error}", flush=True)
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(directory, aside)
    publish.prepare(directory)


def _source(run: TrainableRun) -> tuple[Manifest, Path]:
    """The manifest to write, and the directory whose tokenizer and settings are carried along."""
    model = run.config.model
    if model.checkpoint is not None:
        manifest, carried = read_manifest(model.checkpoint), Path(model.checkpoint) / HF_FOLDER
    else:
        assert model.hf is not None  # the settings demand one of the two
        carried = Path(model.hf)
        manifest = source_manifest(carried, read_architecture(carried))
    arch = run.arch if has_gates(manifest) else run.arch.with_lastkv(None)
    check_same_model(arch, manifest, model.checkpoint or carried)
    manifest = converted(manifest, run.arch)
    adapters = unwrap(run.model).adapters
    base = str(Path(model.checkpoint or carried).absolute())
    adapter = None if adapters is None else {**adapters.spec.to_dict(), "base": base}
    return replace(manifest, dtype=model.dtype, adapter=adapter), carried


def _write_shards(run: TrainableRun, partial: Path, rng: bytes, rng_bytes: int) -> int:
    """Returns the bytes that it took on the host beside the run."""
    values = Whole(run.model, run.optimizer, run.runtime)
    state = {
        "model": weights_state_dict(run.model),
        "optimizer": values.state_dict,
        "rng": _rng_tensor(rng, rng_bytes, run.runtime),
    }

    def save() -> None:
        dist_checkpointing.save(state, str(partial), sharded_strategy=Strategy(values))

    _writing(save, partial)()
    return values.peak


def _read_shards(run: TrainableRun, directory: Path, training: Mapping[str, Any]) -> None:
    layout = {**asdict(run.runtime.layout), "world": run.runtime.world_size}
    with failures_of(directory, "its optimizer state cannot be read"):
        load_optimizer_state(run.model, run.optimizer, directory, training["optimizer_step"])
        if layout == training["layout"]:
            empty = _rng_tensor(b"", training["rng_bytes"], run.runtime)
            packed = dist_checkpointing.load({"rng": empty}, str(directory))["rng"]
            unpack_rng(bytes(packed.numpy().tobytes()).rstrip(b"\0"), run.runtime)


def _rng_tensor(content: bytes, size: int, runtime: Runtime) -> Any:
    """One row of a [world, size] tensor of bytes, padded with zeros."""
    row = torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8).view(1, size)
    place = (0, runtime.rank, runtime.world_size)
    return dist_checkpointing.ShardedTensor.from_rank_offsets("rng", row, place)


def _read_training(directory: Path) -> dict[str, Any]:
    path = directory / TRAINING_FILE
    training = read_json(path, FORMAT_VERSION, _WHAT)
    expected = {
        "model_version": int,
        "optimizer_step": int,
        "scheduler_steps": int,
        "dtype": str,
        "layout": dict,
        "rng_bytes": int,
        "progress": dict,
    }
    for key, kind in expected.items():
        if not isinstance(training.get(key), kind):
            raise UserError(f"{path}: damaged: {key} is missing or not of type {kind.__name__}")
    return training


def _writing(action: Callable[[], Any], place: Path) -> Callable[[], None]:
    """`action`, its failures to write as UserErrors."""

    def call() -> None:
        try:
            action()
        except FAILURES as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            if system := _ERRNO.search(reason):  # whatever the libraries wrap around it
                reason = system[1]
            elif _CUT_SHORT in str(error):  # torch's writer says where it stands, not why
                reason = "a file was cut short, as on a full disk"
            raise UserError(f"{place}: the checkpoint cannot be written: {reason}") from error

    return call


def _retain(newest: Path, keep: int, started_from: str | None) -> None:
    """Delete complete checkpoints before `newest`, except the `keep` - 1 newest and the run's own source."""
    source = None if started_from is None else Path(started_from).resolve()
    older = [path for path in _older(newest) if path.resolve() != source and _is_complete(path)]
    for path in older[: max(0, len(older) - (keep - 1))]:
        doomed = publish.incomplete_path(path)  # renamed first: half deleted, it must not look complete
        try:
            shutil.rmtree(doomed, ignore_errors=True)
            os.replace(path, doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            print(f"{path}: the old checkpoint could not be deleted: {error.strerror or error}", flush=True)


def _older(newest: Path) -> list[Path]:
    """Earlier checkpoints of the same folder, oldest first; none if `newest` has a name of its own."""
    if not _NAME.fullmatch(newest.name):
        return []
    return [path for path in _checkpoints(newest.parent) if _update(path) < _update(newest)]


def _is_complete(path: Path) -> bool:
    try:
        check_completion(path)
    except UserError:
        return False
    return True
