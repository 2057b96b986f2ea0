"""What a Megatron checkpoint says about the Hugging Face model it came from.

A checkpoint directory holds, beside Megatron's own files, `megatron_lrl.json` (this manifest) and `hf/`
(config.json, tokenizer and the other carried files, and tensors that are no part of the model). Together they let
`export` write the same files again, and let a load refuse the weights of another model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lrl.checkpoint.carried import carry_tensors
from megatron_lrl.checkpoint.completion import read_json
from megatron_lrl.checkpoint.publish import carry_files
from megatron_lrl.checkpoint.safetensors_io import FileLayout
from megatron_lrl.errors import UserError
from megatron_lrl.models.hf_config import Architecture, read_architecture
from megatron_lrl.reading import read_object, reason_of

FORMAT_VERSION = 1
MANIFEST_FILE = "megatron_lrl.json"
HF_FOLDER = "hf"


@dataclass(frozen=True)
class Manifest:
    """Attributes:
    fingerprint: `Architecture.fingerprint()` of the model.
    architecture: `Architecture.to_dict()`, for people and for messages that name a differing field.
    dtype: parameter dtype of the stored weights (a key of `precision.DTYPES`).
    layout: names, files, dtypes and shapes of the source's tensors.
    adapter: where an adapter alone is stored, what it is and where its base lies; None: all weights are.
    """

    fingerprint: str
    architecture: dict[str, Any]
    dtype: str
    layout: FileLayout
    adapter: dict[str, Any] | None = None

    @classmethod
    def of(cls, arch: Architecture, dtype: str, layout: FileLayout) -> Manifest:
        """The manifest of a model just read."""
        return cls(arch.fingerprint(), arch.to_dict(), dtype, layout)


def write_manifest(directory: Path, manifest: Manifest, carried_from: Path, arch: Architecture) -> None:
    """Write the manifest into a checkpoint directory, and what is carried along from `carried_from` to its `hf/`.

    `carried_from`: a Hugging Face directory, or the `hf/` of another checkpoint. The carried config.json gets the key
    `lastkv` if the model has it and its source did not, and loses quantization_config: weights are stored wide.
    """
    carry_files(carried_from, directory / HF_FOLDER)
    if manifest.adapter is None:
        carry_tensors(carried_from, directory / HF_FOLDER, manifest.layout, arch)
    _adapt_config(directory / HF_FOLDER / "config.json", manifest.architecture.get("lastkv"))
    content = {
        "format_version": FORMAT_VERSION,
        "fingerprint": manifest.fingerprint,
        "architecture": manifest.architecture,
        "dtype": manifest.dtype,
        "source": manifest.layout.to_dict(),
        **({} if manifest.adapter is None else {"adapter": manifest.adapter}),
    }
    partial = directory / f"{MANIFEST_FILE}.incomplete"
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, directory / MANIFEST_FILE)


def _adapt_config(config_file: Path, lastkv: Mapping[str, Any] | None) -> None:
    """A file that says already what the model is keeps its bytes."""
    before = read_object(config_file)
    after = {key: value for key, value in before.items() if key != "quantization_config"}
    if isinstance(after.get("text_config"), dict):
        text = after["text_config"]
        after["text_config"] = {key: text[key] for key in text if key != "quantization_config"}
    if lastkv is not None:
        after["lastkv"] = lastkv
    if after != before:
        config_file.write_text(json.dumps(after, indent=2) + "\n", encoding="utf-8")


def read_manifest(ckpt_dir: str | Path) -> Manifest:
    """Raises UserError: no checkpoint there, one of another format version, or a damaged manifest."""
    path = Path(ckpt_dir) / MANIFEST_FILE
    content = read_json(path, FORMAT_VERSION, "a checkpoint written by `import` or `train`")
    try:
        return Manifest(
            fingerprint=str(content["fingerprint"]),
            architecture=dict(content["architecture"]),
            dtype=str(content["dtype"]),
            layout=FileLayout.from_dict(content["source"]),
            adapter=None if content.get("adapter") is None else dict(content["adapter"]),
        )
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path}: damaged manifest: {reason_of(error)}") from error


def read_checkpoint_architecture(ckpt_dir: str | Path) -> tuple[Architecture, Manifest]:
    """The model of a checkpoint. Raises UserError if its config.json was changed after the import."""
    manifest = read_manifest(ckpt_dir)
    arch = read_architecture(Path(ckpt_dir) / HF_FOLDER)
    check_same_model(arch, manifest, ckpt_dir)
    return arch, manifest


def require_weights(manifest: Manifest, ckpt_dir: str | Path) -> None:
    """Raise `UserError` if a checkpoint holds an adapter alone, where a model is wanted."""
    if manifest.adapter is not None:
        raise UserError(
            f"{ckpt_dir}: holds an adapter, not a model (its base: {manifest.adapter.get('base')}); `export` makes a "
            "directory of it for adapter.path and for peft, `export --merge` a whole model"
        )


def check_same_model(arch: Architecture, manifest: Manifest, ckpt_dir: str | Path) -> None:
    """Raise UserError naming the first differing fields if the checkpoint is not of model `arch`."""
    if manifest.fingerprint == arch.fingerprint():
        return
    stored, wanted = manifest.architecture, arch.to_dict()
    differing = [
        f"{key} is {stored.get(key)!r} there and {wanted.get(key)!r} here"
        for key in wanted | stored
        if stored.get(key) != wanted.get(key)
    ]
    told = "; ".join(differing[:3]) or "its fingerprint differs"
    raise UserError(f"{ckpt_dir}: the checkpoint of another model: {told}")
