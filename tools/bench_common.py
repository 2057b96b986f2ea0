"""What the measurements share: a random model, one window's gradient, and the memory it took.

Legend: G responses of R tokens each; S tokens scored at once (K responses, flat).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_lrl.errors import UserError
from megatron_lrl.lifetimes.window import UpdateWindow

if TYPE_CHECKING:  # Megatron-Core is imported once the runtime has prepared it
    from megatron_lrl.lifetimes.run import Run
    from megatron_lrl.lifetimes.work import TokenLoss

MIB = 2**20


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The shape of the random model."""
    parser.add_argument("--layers", type=int, default=4, metavar="N")
    parser.add_argument("--hidden", type=int, default=64, metavar="N")
    parser.add_argument("--intermediate", type=int, default=176, metavar="N")
    parser.add_argument("--heads", type=int, default=4, metavar="N", help="query heads")
    parser.add_argument("--kv-heads", type=int, default=2, metavar="N")
    parser.add_argument("--vocab", type=int, default=512, metavar="N")


def options_of(doc: str | None, **numbers: tuple[int, str, str]) -> argparse.ArgumentParser:
    """A parser with the shape of the random model and whole numbers: name=(default, letter, help)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    for name, (default, letter, text) in numbers.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=default,
            metavar=letter,
            help=f"{text} (default {default})",
        )
    return parser


def write_model(folder: Path, options: argparse.Namespace, positions: int) -> None:
    """A random llama as a Hugging Face directory, with transformers' initialisation."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def link_model(folder: Path, source: Path, positions: int) -> int:
    """The model of a Hugging Face directory, allowed at least so many positions. Returns its vocabulary size.

    Weights are linked, not copied. Positions beyond what a model was trained for cost what others cost.
    Raises `UserError` if the directory holds no model.
    """
    weights = sorted(source.glob("*.safetensors*"))
    try:
        described = json.loads((source / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--hf {source}: no readable config.json ({error})") from error
    if not weights:
        raise UserError(f"--hf {source}: no *.safetensors")
    text = described.get("text_config", described)
    text["max_position_embeddings"] = max(positions, text.get("max_position_embeddings", 0))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(described))
    for file in weights:
        (folder / file.name).symlink_to(file.resolve())
    return int(text["vocab_size"])


def trajectories(vocab: int, prompt: int, response: int, group: int) -> tuple[list[int], list[list[int]]]:
    """One random prompt and the responses to it, the same for every caller."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab, (prompt,), generator=draw).tolist()
    return ids, [torch.randint(vocab, (response,), generator=draw).tolist() for _ in range(group)]


def run_window(
    run: Run,
    prompt_ids: Sequence[int],
    responses: Sequence[Sequence[int]],
    weights: Sequence[float],
    contract: str,
    concurrent: int,
    step: bool = False,
) -> None:
    """Capture, replay, sweep and reduce one prompt; the optimizer steps only if asked to.

    Loss: -sum over responses of weight x log-probability; responses are of equal length. The gradient stays in the
    buffers until the next window opens.
    """
    from megatron_lrl.lifetimes.contributions import BranchKey
    from megatron_lrl.lifetimes.work import Branch, batches_of, work_of

    branches = [Branch(BranchKey("g", i), tuple(ids)) for i, ids in enumerate(responses)]
    batches = batches_of(branches, concurrent)
    weight_G = torch.tensor(weights, device=run.runtime.device)

    length = len(responses[0])

    def loss_of(first: int) -> TokenLoss:
        def loss(
            logprob_S: torch.Tensor, _: torch.Tensor, index_S: torch.Tensor
        ) -> tuple[torch.Tensor, dict]:
            return -(weight_G[first + index_S // length] * logprob_S).sum(), {}

        return loss

    starts = range(0, len(branches), concurrent)
    with UpdateWindow(run) as window:
        window.fix(branch.key for branch in branches)
        with window.prompt_group("g", prompt_ids, contract=contract) as group:
            window.replay(group, work_of(batches, [loss_of(start) for start in starts]))
        window.reduce()
        if step:
            window.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()


class ProcessPeak:
    """Peak memory of a block above what was held before it: the CUDA allocator's, or Linux's resident set."""

    def __init__(self) -> None:
        self.bytes: int | None = None

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            yield
            self.bytes = torch.cuda.max_memory_allocated() - before
            return
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # freed memory of earlier rows would hide new memory
        start = resident_set("VmRSS") if self._reset() else None
        yield
        if start is not None and (peak := resident_set("VmHWM")) is not None:
            self.bytes = max(0, peak - start)

    @staticmethod
    def _reset() -> bool:
        """Start VmHWM afresh (proc(5), clear_refs); False where the system has no such thing."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True


def resident_set(key: str, process: str | int = "self") -> int | None:
    """Bytes of a process: ``VmRSS`` now or ``VmHWM`` at its peak; None where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return None
