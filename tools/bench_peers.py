"""The same gradient, computed by others: transformers with plain autograd, and prefix-grouper's shared-prefix forward.

    python tools/bench_peers.py --prompt 2048 --response 32 --group 8
    pip install --no-deps prefix-grouper==0.0.1.post1        # only for this; without it that row is left out

Same weights, same trajectories, same loss: -sum over responses of weight x log-probability. Gradients are compared with
transformers' before anything is timed. Times are interleaved in one process; the memory of each comes from a process of
its own. All use PyTorch's fused attention, and logits exist for the response tokens alone.

Legend: G responses of R tokens after a prompt of P tokens; h heads, d head dim, H hidden size, V vocabulary.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from bench_common import MIB, ProcessPeak, add_model_arguments, run_window, trajectories, write_model
from torch import Tensor
from tqdm import tqdm

from megatron_lrl.config import load_config
from megatron_lrl.errors import UserError
from megatron_lrl.runtime import Layout, Runtime, runtime_scope

PINNED = "prefix-grouper==0.0.1.post1"
TOLERANCE = 1e-4  # relative L2 over all parameters, float32
METHODS = ("transformers", "prefix-grouper", "exact", "exact-kept")
_HF_ATTENTION = "prefix_grouper_sdpa"

Gradients = Mapping[str, Tensor]
Work = Callable[[Sequence[int], Sequence[Sequence[int]], Sequence[float]], None]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], formatter_class=about)
    parser.add_argument("--prompt", type=int, default=512, metavar="N", help="P, prompt tokens")
    parser.add_argument("--response", type=int, default=32, metavar="N", help="R, response tokens")
    parser.add_argument("--group", type=int, default=4, metavar="N", help="G, responses of the prompt")
    parser.add_argument(
        "--concurrent", type=int, default=1, metavar="N", help="K, responses replayed at once"
    )
    parser.add_argument("--chunk", type=int, default=512, metavar="N", help="Z, capture chunk size")
    parser.add_argument(
        "--keep-mib", type=int, default=4096, metavar="N", help="prefix.keep_graph_bytes, last row"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="interleaved runs; medians are shown"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add_model_arguments(parser)
    parser.add_argument("--memory-of", nargs=2, metavar=("METHOD", "FOLDER"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def hf_model(folder: Path, attention: str = "sdpa") -> Any:
    """transformers' model with the weights in ``folder``, float32, on the default device."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
    )
    model.to(device="cuda" if torch.cuda.is_available() else "cpu")
    return model.train()


def loss_of(hidden_GRH: Tensor, head: Any, ids_GR: Tensor, weight_G: Tensor) -> Tensor:
    """-sum of weight x log-probability of each response token, from the hidden states that predict them."""
    logits_GRV = head(hidden_GRH).float()
    logprob_GR = torch.log_softmax(logits_GRV, -1).gather(-1, ids_GR.unsqueeze(-1)).squeeze(-1)
    return -(weight_G.unsqueeze(-1) * logprob_GR).sum()


def zeroed(model: Any) -> None:
    """Zero gradients in place, as a gradient buffer would be: they belong to the model, not to the window."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def transformers_work(model: Any) -> Work:
    """Plain autograd: each response forward and backward with the whole prompt, one after another."""

    def work(prompt: Sequence[int], responses: Sequence[Sequence[int]], weights: Sequence[float]) -> None:
        zeroed(model)
        for ids, weight in zip(responses, weights, strict=True):
            ids_1R = torch.tensor([list(ids)], device=model.device)
            tokens = torch.tensor([[*prompt, *ids[:-1]]], device=model.device)
            hidden = model.model(tokens, use_cache=False).last_hidden_state[:, len(prompt) - 1 :]
            loss_of(hidden, model.lm_head, ids_1R, torch.tensor([weight], device=model.device)).backward()

    return work


@functools.lru_cache(maxsize=4)
def _suffix_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Causal mask whose last query sees the last key: [1, 1, queries, keys], True = attend."""
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return mask.view(1, 1, queries, keys)


def _grouped_attention(
    module: Any, q_1hsd: Tensor, k_1htd: Tensor, v_1htd: Tensor, _mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface on top of `PrefixGrouper.forward`, with transformers' own SDPA inside."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    grouper = kwargs.pop("prefix_grouper")

    def attend(q: Tensor, k: Tensor, v: Tensor, _padding: Tensor) -> Tensor:
        # Responses are of equal length, so nothing is padded: the prompt is plainly causal, a response needs a mask.
        mask = None if q.shape[2] == k.shape[2] else _suffix_mask(q.shape[2], k.shape[2], q.device)
        return sdpa_attention_forward(module, q, k, v, mask, scaling=kwargs.get("scaling"))[0]

    return grouper.forward(attend, q_1hsd, k_1htd, v_1htd), None


def prefix_grouper_work(model: Any) -> Work:
    """One forward of prompt + all responses packed in a row, as prefix-grouper's documentation describes it."""
    from prefix_grouper import PrefixGrouper

    def work(prompt: Sequence[int], responses: Sequence[Sequence[int]], weights: Sequence[float]) -> None:
        zeroed(model)
        P, R, G = len(prompt), len(responses[0]), len(responses)
        device = model.device
        grouper = PrefixGrouper([[P, *[R] * G]], device=device, padding_mode="right")
        prompt_1P = torch.tensor([list(prompt)], device=device)
        ids_GR = torch.tensor([list(ids) for ids in responses], device=device)
        packed = grouper.concat_input(prompt_1P, torch.ones_like(prompt_1P), ids_GR, torch.ones_like(ids_GR))
        positions = torch.cat([torch.arange(P), torch.arange(P, P + R).repeat(G)]).unsqueeze(0).to(device)
        hidden = model.model(packed, position_ids=positions, use_cache=False, prefix_grouper=grouper)
        # include_prefix_last: the prompt's last token predicts each response's first.
        _, _, suffix_GRH, _ = grouper.split_output(hidden.last_hidden_state, include_prefix_last=1)
        loss_of(suffix_GRH[:, :-1], model.lm_head, ids_GR, torch.tensor(weights, device=device)).backward()

    return work


@contextmanager
def opened(
    method: str, folder: Path, options: argparse.Namespace, runtime: Runtime
) -> Iterator[tuple[Work, Callable[[], Gradients]]]:
    """The work of a method, and its gradients under Hugging Face names."""
    if method.startswith("exact"):
        keep = options.keep_mib * MIB if method == METHODS[-1] else 0
        (folder / "bench.toml").write_text("")
        settings = [
            f"model.hf={folder / 'hf'}",
            f"prefix.chunk_size={options.chunk}",
            f"prefix.keep_graph_bytes={keep}",
        ]
        config = load_config(folder / "bench.toml", settings)
        from megatron_lrl.checkpoint.hf_export import gather_hf_tensors, parameter_gradient
        from megatron_lrl.lifetimes.open import open_run

        with open_run(config, runtime, gradients=True) as run:
            yield (
                lambda prompt, responses, weights: run_window(
                    run, prompt, responses, weights, "exact", options.concurrent
                ),
                lambda: dict(gather_hf_tensors(run.model, run.arch, runtime, parameter_gradient)),
            )
        return
    if method == "prefix-grouper":
        from transformers.modeling_utils import AttentionInterface

        AttentionInterface.register(_HF_ATTENTION, _grouped_attention)
        model = hf_model(folder / "hf", _HF_ATTENTION)
        work = prefix_grouper_work(model)
    else:
        model = hf_model(folder / "hf")
        work = transformers_work(model)
    yield work, lambda: {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative_l2(gradients: Gradients, reference: Gradients) -> float:
    """|a - b| / |b| over all parameters. Raises `UserError` if they are not gradients of the same parameters."""
    if set(gradients) != set(reference):
        raise UserError(f"gradients of different parameters: {sorted(set(gradients) ^ set(reference))}")
    difference = sum(float((gradients[n].double() - reference[n].double()).square().sum()) for n in reference)
    return (difference / sum(float(g.double().square().sum()) for g in reference.values())) ** 0.5


def task(options: argparse.Namespace) -> tuple[list[int], list[list[int]], list[float]]:
    """Prompt, responses and their weights: different signs and sizes, like advantages."""
    prompt, responses = trajectories(options.vocab, options.prompt, options.response, options.group)
    scale = 1.0 / (options.group * options.response)
    return prompt, responses, [scale * (1 + i / 2) * (-1) ** i for i in range(options.group)]


def peak_of(method: str, folder: Path, options: argparse.Namespace) -> int | None:
    """Peak bytes of one window above parameters and gradients; run it in a process of its own."""
    prompt, responses, weights = task(options)
    with runtime_scope(Layout(1, 1, 1, 1)) as runtime, opened(method, folder, options, runtime) as (work, _):
        # The warm-up allocates gradients and loads what loads lazily.
        work(prompt[:16], [ids[:4] for ids in responses[:1]], weights[:1])
        peak = ProcessPeak()
        with peak.measure():
            work(prompt, responses, weights)
        return peak.bytes


def peaks(methods: Sequence[str], folder: Path, arguments: Sequence[str]) -> dict[str, int | None]:
    result: dict[str, int | None] = {}
    for method in tqdm(methods, desc="memory", leave=False):
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            *arguments,
            "--memory-of",
            method,
            str(folder),
        ]
        child = subprocess.run(command, capture_output=True, text=True, check=False)
        if child.returncode:
            raise UserError(f"the memory run of {method} failed: {child.stderr.strip().splitlines()[-1:]}")
        result[method] = json.loads(child.stdout.strip().splitlines()[-1])
    return result


def timings(
    methods: Sequence[str], folder: Path, options: argparse.Namespace
) -> dict[str, list[tuple[float, float]]]:
    """(seconds, CPU seconds) of interleaved windows, after all gradients agreed with transformers'.

    Raises `UserError` if one does not: then there is nothing to compare.
    """
    inputs = task(options)
    reference_of = METHODS[0]
    seconds: dict[str, list[tuple[float, float]]] = {method: [] for method in methods}
    with runtime_scope(Layout(1, 1, 1, 1)) as runtime, ExitStack() as stack:
        works: dict[str, Work] = {}
        reference: Gradients = {}
        for method in dict.fromkeys([reference_of, *methods]):
            work, gradients = stack.enter_context(opened(method, folder, options, runtime))
            work(*inputs)
            works[method] = work
            if method == reference_of:
                reference = {name: gradient.clone() for name, gradient in gradients().items()}
                continue
            distance = relative_l2(gradients(), reference)
            print(f"gradient of {method!r} against transformers': relative L2 {distance:.2e}", flush=True)
            if not distance <= TOLERANCE:
                raise UserError(
                    f"{method}: not the same gradient (relative L2 > {TOLERANCE:g}); nothing was timed"
                )
        for method in tqdm([*methods] * options.repeats, desc="seconds", leave=False):
            start, cpu = time.perf_counter(), time.process_time()
            works[method](*inputs)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[method].append((time.perf_counter() - start, time.process_time() - cpu))
    return seconds


def table(
    seconds: Mapping[str, list[tuple[float, float]]], memory: Mapping[str, int | None], peer: str
) -> str:
    """One row per method; ratios are against ``peer``."""
    head = (
        f"{'method':<20} {'s/window':>9} {'CPU s':>8} {'ratio':>7} {'MiB above the model':>20} {'ratio':>7}"
    )
    lines = [f"ratios: against {peer}", head, "-" * len(head)]
    cpu = {method: statistics.median(c for _, c in values) for method, values in seconds.items()}
    for method, values in seconds.items():
        mine, theirs = memory[method], memory[peer]
        share = "-" if mine is None or not theirs else f"{mine / theirs:.3f}"
        lines.append(
            f"{method:<20} {statistics.median(s for s, _ in values):>9.3f} {cpu[method]:>8.3f} "
            f"{cpu[method] / cpu[peer]:>7.3f} {'-' if mine is None else f'{mine / MIB:.1f}':>20} {share:>7}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(arguments)
    if options.memory_of:
        method, folder = options.memory_of
        print(json.dumps(peak_of(method, Path(folder), options)))
        return 0
    methods = list(options.methods)
    if "prefix-grouper" in methods:
        try:
            import prefix_grouper  # noqa: F401
        except ImportError:
            methods.remove("prefix-grouper")
            print(
                f"prefix-grouper is not installed: its row is left out (pip install --no-deps {PINNED})",
                flush=True,
            )
    if not methods:
        print("error: nothing left to measure", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="bench-peers-") as name:
        folder = Path(name)
        write_model(folder / "hf", options, options.prompt + options.response)
        try:
            seconds = timings(methods, folder, options)
            memory = peaks(methods, folder, arguments)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    print(
        f"P = {options.prompt}, R = {options.response}, G = {options.group}, K = {options.concurrent}, "
        f"Z = {options.chunk}, {options.layers} layers, hidden {options.hidden}, float32, "
        f"{torch.get_num_threads()} CPU threads, CUDA {torch.cuda.is_available()}"
    )
    print(table(seconds, memory, "prefix-grouper" if "prefix-grouper" in methods else methods[0]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
