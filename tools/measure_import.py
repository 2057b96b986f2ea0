"""Peak memory of `import` and `export` on a synthetic sharded checkpoint, above what the process needed before.

    python tools/measure_import.py [--gigabytes 2] [--shard-megabytes 256] [--keep DIR]

Writes a llama in bfloat16, imports and exports it, each in a process of its own, and prints the peak of each one's
anonymous memory (RssAnon, looked at every millisecond) above the interpreter: after all modules were loaded and the
runtime was up, before the conversion. Pages of mapped files are not counted: how many of them are resident is up to
the kernel, which takes them back when it needs them. Linux only.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

HIDDEN, FFN, HEADS, VOCAB = 1024, 2816, 16, 16000


def write_model(directory: Path, gigabytes: float, shard_bytes: int) -> int:
    """Write a model of about this size; returns the size of its largest shard in bytes."""
    from megatron_lrl.checkpoint.safetensors_io import FileLayout, TensorRecord
    from megatron_lrl.checkpoint.safetensors_writer import write_directory
    from megatron_lrl.checkpoint.table import conversion_table, stored_shapes
    from megatron_lrl.models.hf_config import architecture_from_dict

    per_layer = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCAB,
        "num_hidden_layers": max(1, int((gigabytes * 1e9 - 4 * VOCAB * HIDDEN) / per_layer)),
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
    }
    shapes = stored_shapes(conversion_table(architecture_from_dict(config)))
    records: list[TensorRecord] = []
    held: dict[str, int] = {}
    file = 0
    for name, shape in shapes.items():
        size = 2 * shape.numel()
        if held.get(str(file), 0) and held[str(file)] + size > shard_bytes:
            file += 1
        held[str(file)] = held.get(str(file), 0) + size
        records.append(TensorRecord(name, f"model-{file + 1:05d}.safetensors", "BF16", tuple(shape)))

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, shape) in enumerate(shapes.items()):
            yield name, torch.full(shape, number, dtype=torch.bfloat16)

    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_directory(directory, FileLayout(tuple(records), indexed=True), tensors())
    return max(held.values())


def measure(verb: str, source: Path, target: Path) -> tuple[float, float]:
    """Run a conversion in a new process: (anonymous bytes before it, its peak above that)."""
    command = [sys.executable, __file__, "--child", verb, str(source), str(target)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    before, peak = json.loads(printed.strip().splitlines()[-1])
    return before, peak - before


def _anonymous() -> int:
    found = re.search(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError("/proc/self/status has no RssAnon; this measurement needs Linux")
    return 1024 * int(found[1])


class _Peak(threading.Thread):
    """Looks at this process's anonymous memory until it is asked for the peak."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._done, self._peak = threading.Event(), 0

    def run(self) -> None:
        while not self._done.wait(0.001):
            self._peak = max(self._peak, _anonymous())

    def stop(self) -> int:
        self._done.set()
        self.join()
        return max(self._peak, _anonymous())


def _child(verb: str, source: str, target: str) -> None:
    from megatron_lrl.checkpoint.hf_export import export_checkpoint
    from megatron_lrl.checkpoint.hf_import import import_checkpoint
    from megatron_lrl.runtime import Layout, runtime_scope

    with runtime_scope(Layout()) as runtime:
        before, peak = _anonymous(), _Peak()
        peak.start()
        (import_checkpoint if verb == "import" else export_checkpoint)(source, target, runtime)
        print(json.dumps([before, peak.stop()]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--shard-megabytes", type=int, default=256)
    parser.add_argument("--keep", type=Path, help="work in this new directory and leave it")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(*options.child)
        return
    with tempfile.TemporaryDirectory() as temporary:
        root = options.keep or Path(temporary)
        shard = write_model(root / "hf", options.gigabytes, options.shard_megabytes * 1_000_000)
        print(f"largest shard {shard / 1e6:.0f} MB")
        for verb, source, target in (("import", "hf", "ckpt"), ("export", "ckpt", "back")):
            before, above = measure(verb, root / source, root / target)
            print(f"{verb}: {above / 1e6:.0f} MB above {before / 1e6:.0f} MB = {above / shard:.2f} shards")


if __name__ == "__main__":
    main()
