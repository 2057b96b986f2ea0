"""The command line: ``megatron-lrl VERB ...``, the same as ``python -m megatron_lrl VERB ...``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from megatron_lrl import __version__
from megatron_lrl.config import check_supported, describe_settings, load_config
from megatron_lrl.errors import UserError

_DESCRIPTION = """\
Reinforcement learning of large models on very long prompts, on Megatron-Core.

A prompt is captured once into state that stays on the ranks that read it; each response is replayed against it.
Every verb also runs on many ranks:  torchrun --nproc-per-node N -m megatron_lrl VERB ...
"""
_EXAMPLES = """\
examples:
  megatron-lrl import Qwen3-8B ckpt/qwen3-8b
  torchrun --nproc-per-node 8 -m megatron_lrl train config.toml parallel.tp=2 parallel.cp=4
  megatron-lrl export runs/name/checkpoints/update-000100 Qwen3-8B-rl
  megatron-lrl train --settings          all keys of a config file
"""


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="megatron-lrl", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=f"megatron-lrl {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, text: str, epilog: str = "") -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=text, description=text, epilog=epilog, formatter_class=raw)

    for name, text, source, target in (
        ("import", "convert a Hugging Face directory to a Megatron distributed checkpoint", "HF_DIR", "CKPT_DIR"),
        ("export", "convert a checkpoint (of import or train) back to a Hugging Face directory", "CKPT_DIR", "HF_DIR"),
    ):
        sub = verb(name, text, "The target must not exist; it appears only when it is complete.")
        sub.add_argument("source", metavar=source)
        sub.add_argument("target", metavar=target)
        for size in ("tp", "pp"):
            sub.add_argument(f"--{size}", type=int, default=1, metavar="N", help=f"{size} size (default 1)")

    configured = {
        "train": "run updates; resumes from the output folder's newest checkpoint",
        "generate": "sample a group of responses for every prompt of a file",
        "score": "log-probabilities of recorded responses",
        "grad": "the gradient of one window of recorded responses; no step",
        "check": "consistency report: rollout against replay, contracts against conventional",
    }
    for name, text in configured.items():
        sub = verb(name, text, "Settings: megatron-lrl train --settings. Paths are relative to the working directory.")
        sub.add_argument("config", metavar="CONFIG", nargs="?", help="TOML file of settings")
        sub.add_argument("overrides", metavar="key=value", nargs="*", help="settings that replace the file's")
        sub.add_argument("--settings", action="store_true", help="print every setting with its default, and exit")
        if name == "generate":
            sub.add_argument("--prompts", required=True, metavar="P.jsonl", help="prompts to sample")
            sub.add_argument("--out", required=True, metavar="T.jsonl", help="trajectories to write")
        if name in ("score", "grad"):
            sub.add_argument("--trajectories", required=True, metavar="T.jsonl", help="recorded responses")
            out = "S.jsonl" if name == "score" else "G.safetensors"
            sub.add_argument("--out", required=True, metavar=out, help="file to write")
        if name == "check":
            sub.add_argument("--out", metavar="R.json", help="also write the report as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb. Returns the exit status: 0, 2 for a mistake of the user, 1 for a check that failed."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if "--settings" in arguments:
        print(describe_settings())
        return 0
    parser = _parser()
    # Overrides may stand before and after options.
    options, rest = parser.parse_known_args(arguments)
    if stray := [word for word in rest if word.startswith("-") or "=" not in word]:
        parser.error(f"unrecognised arguments: {' '.join(stray)}")
    if hasattr(options, "overrides"):
        options.overrides += rest
        if options.config is None:
            parser.error(f"{options.verb} needs CONFIG, a TOML file of settings")
    try:
        return _run(options)
    except UserError as error:
        # Every rank has the same error; one prints it.
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


def _run(options: argparse.Namespace) -> int:
    # Torch and Megatron-Core are imported only once the command line is known to make sense.
    from megatron_lrl.runtime import Layout, init_distributed, runtime_scope, shutdown_runtime

    world = init_distributed()
    try:
        if options.verb in ("import", "export"):
            layout = Layout(tp=options.tp, pp=options.pp)
            with runtime_scope(layout) as runtime:
                return _convert(options, runtime)
        config = world.together(load_config, options.config, options.overrides)
        world.together(check_supported, config)
        parallel = config.parallel
        layout = Layout(parallel.tp, parallel.cp, parallel.pp, parallel.ep)
        with runtime_scope(layout, config.train.seed) as runtime:
            return _VERBS[options.verb](options, config, runtime)
    finally:
        shutdown_runtime()


def _convert(options: argparse.Namespace, runtime: Any) -> int:
    if options.verb == "import":
        from megatron_lrl.checkpoint.hf_import import import_checkpoint

        import_checkpoint(options.source, options.target, runtime)
    else:
        from megatron_lrl.checkpoint.hf_export import export_checkpoint

        export_checkpoint(options.source, options.target, runtime)
    if runtime.is_main:
        print(f"wrote {options.target}", flush=True)
    return 0


def _train(options: argparse.Namespace, config: Any, runtime: Any) -> int:
    from megatron_lrl.rl.verbs import train

    train(config, runtime)
    return 0


def _generate(options: argparse.Namespace, config: Any, runtime: Any) -> int:
    from megatron_lrl.rl.verbs import generate

    generate(config, runtime, options.prompts, options.out)
    return 0


def _score(options: argparse.Namespace, config: Any, runtime: Any) -> int:
    from megatron_lrl.rl.verbs import score

    score(config, runtime, options.trajectories, options.out)
    return 0


def _grad(options: argparse.Namespace, config: Any, runtime: Any) -> int:
    from megatron_lrl.rl.verbs import grad

    grad(config, runtime, options.trajectories, options.out)
    return 0


def _check(options: argparse.Namespace, config: Any, runtime: Any) -> int:
    from megatron_lrl.checks.report import check

    return 0 if check(config, runtime, options.out) else 1


_VERBS: dict[str, Callable[[argparse.Namespace, Any, Any], int]] = {
    "train": _train,
    "generate": _generate,
    "score": _score,
    "grad": _grad,
    "check": _check,
}
