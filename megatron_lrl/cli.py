"""The command line: ``megatron-lrl VERB ...``, the same as ``python -m megatron_lrl VERB ...``."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from megatron_lrl import __version__, arguments
from megatron_lrl.cli_text import DESCRIPTION, EXAMPLES, TEXTS
from megatron_lrl.config import describe_settings, load_config
from megatron_lrl.errors import UserError
from megatron_lrl.preflight import check_conversion, check_inputs
from megatron_lrl.reading import check_path, printable
from megatron_lrl.table import MOST_RANKS

_PATHS = {"source", "target", "config", "prompts", "trajectories", "out"}


class _Parser(argparse.ArgumentParser):
    """Speaks on one rank: all get the same command line."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if _speaks():
            super()._print_message(message, file)


def _speaks() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="megatron-lrl", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"megatron-lrl {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", title="verbs")
    subparsers = {
        name: verbs.add_parser(
            name,
            help=line,
            usage=f"megatron-lrl {usage}",
            description="\n\n".join(textwrap.fill(text, 100) for text in paragraphs),
            epilog=f"example:\n  megatron-lrl {example}",
            formatter_class=raw,
            allow_abbrev=False,
        )
        for name, (line, paragraphs, usage, example) in TEXTS.items()
    }
    for name, source, target in (("import", "HF_DIR", "CKPT_DIR"), ("export", "CKPT_DIR", "HF_DIR")):
        sub = subparsers.pop(name)
        sub.add_argument("source", metavar=source, help="directory to read")
        sub.add_argument("target", metavar=target, help="directory to create")
        for size, what in (("tp", "tensor"), ("pp", "pipeline")):
            sub.add_argument(
                f"--{size}",
                type=arguments.size,
                default=1,
                metavar="N",
                help=f"{what} parallel size (default 1)",
            )
        if name == "export":
            sub.add_argument(
                "--merge",
                action="store_true",
                help="of an adapter's checkpoint: a whole model, its base with it",
            )
        else:
            sub.add_argument(
                "--lastkv-chunk",
                type=arguments.size,
                metavar="C",
                help="tokens per LastKV chunk of the converted model",
            )
            sub.add_argument(
                "--no-lastkv-blend",
                action="store_true",
                help="the previous chunk is read from the last layer alone",
            )
            sub.add_argument(
                "--lastkv-gate-init",
                type=arguments.share,
                metavar="A",
                help="alpha of the blend at initialisation, between 0 and 1 (default 0.1)",
            )
    for name, sub in subparsers.items():
        sub.add_argument("config", metavar="CONFIG", nargs="?", help="TOML file of settings")
        sub.add_argument("overrides", metavar="key=value", nargs="*", help="settings that replace the file's")
        sub.add_argument(
            "--settings", action="store_true", help="print every setting with its default, and exit"
        )
        if name == "generate":
            sub.add_argument("--prompts", required=True, metavar="P.jsonl", help="prompts to sample")
            sub.add_argument("--out", required=True, metavar="T.jsonl", help="trajectories to write")
        if name in ("score", "grad"):
            sub.add_argument("--trajectories", required=True, metavar="T.jsonl", help="recorded responses")
            out = "S.jsonl" if name == "score" else "G.safetensors"
            sub.add_argument("--out", required=True, metavar=out, help="file to write")
        if name == "check":
            sub.add_argument("--out", metavar="R.json", help="also write the report as JSON")
        if name == "plan":
            sub.add_argument(
                "--world",
                type=arguments.world,
                metavar="N",
                help=f"ranks, at most {MOST_RANKS} (default: tp * cp * pp)",
            )
            sub.add_argument(
                "--prompt",
                type=arguments.size,
                metavar="P",
                help="prompt tokens (default 32768, if they fit)",
            )
            sub.add_argument(
                "--response",
                type=arguments.size,
                metavar="R",
                help="response tokens (default rollout.max_new_tokens)",
            )
            sub.add_argument(
                "--budget", type=arguments.positive, metavar="GIB", help="memory of one rank, in GiB"
            )
            sub.add_argument(
                "--tflops",
                type=arguments.positive,
                metavar="T",
                help="10^12 operations a second that a rank achieves",
            )
            sub.add_argument(
                "--search",
                action="store_true",
                help="instead: the best layouts of --world ranks, by room and by work",
            )
            sub.add_argument("--out", metavar="R.json", help="also write the bytes as JSON")
        if name != "train":
            sub.add_argument(
                "--overwrite",
                action="store_true",
                help="--out may replace a file that the verb did not write",
            )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb.

    Returns the exit status: 0, 2 for a mistake of the user, 1 for a check that failed, 130 when interrupted.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if "--settings" in arguments:
        if _speaks():
            print(describe_settings())
        return 0
    parser = _parser()
    # Overrides may stand before and after options.
    options, rest = parser.parse_known_args(arguments)
    configured = hasattr(options, "overrides")
    if stray := [word for word in rest if not configured or word.startswith("-") or "=" not in word]:
        parser.error(f"unrecognised arguments: {' '.join(stray)}")
    if options.verb == "import" and options.lastkv_chunk is None:
        for option in ("no_lastkv_blend", "lastkv_gate_init"):
            if getattr(options, option):
                parser.error(f"--{option.replace('_', '-')} needs --lastkv-chunk")
    if configured:
        options.overrides += rest
        if options.config is None:
            parser.error(f"{options.verb} needs CONFIG, a TOML file of settings")
    if ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
        there, absent = ("RANK", "WORLD_SIZE") if "RANK" in os.environ else ("WORLD_SIZE", "RANK")
        print(
            f"error: the environment sets {there} and not {absent}: launch with torchrun, which sets both, or unset it",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        return 2
    try:
        for name in _PATHS & vars(options).keys():
            check_path(getattr(options, name) or "", name)
        return _run(options)
    except UserError as error:
        # Every rank has the same error; one prints it.
        if _speaks():
            print(f"error: {printable(str(error))}", file=sys.stderr, flush=True)
        return 2
    except (MemoryError, ImportError) as error:
        if not isinstance(error, MemoryError) and "failed to map" not in str(error):
            raise
        if _speaks():
            print(
                f"error: not enough memory may be used (ulimit -v, or the job's limit): {error}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        return 2
    except KeyboardInterrupt:
        return 130  # as a shell reports it; `train` saves a checkpoint and returns 0


def _run(options: argparse.Namespace) -> int:
    # Torch and Megatron-Core are imported only once the command line is known to make sense. Ranks of other machines
    # may see other files: then all hear of it together, below.
    if options.verb == "plan":
        return _plan(options)
    if os.environ.get("WORLD_SIZE", "1") == os.environ.get("LOCAL_WORLD_SIZE", "1"):
        _settings(options, writes=True)  # every rank, or one would end and the others wait for it
    from megatron_lrl.runtime import Layout, init_distributed, runtime_scope, shutdown_runtime

    world = init_distributed()
    try:
        if options.verb in ("import", "export"):
            layout = Layout(tp=options.tp, pp=options.pp)
            with runtime_scope(layout) as runtime:
                return _convert(options, runtime)
        config = world.together(_settings, options, world.is_main)
        parallel = config.parallel
        layout = Layout(parallel.tp, parallel.cp, parallel.pp, parallel.ep)
        with runtime_scope(layout, config.train.seed) as runtime:
            return _run_model(options, config, runtime)
    finally:
        shutdown_runtime()


def _settings(options: argparse.Namespace, writes: bool) -> Any:
    """The verb's settings, if it has some; raises `UserError` for what can be seen without reading a model."""
    if options.verb in ("import", "export"):
        return check_conversion(options.verb, options.source, options.target)
    config = load_config(options.config, options.overrides)
    check_inputs(options.verb, config, vars(options), writes)
    return config


def _plan(options: argparse.Namespace) -> int:
    """One process, whatever the launcher: the ranks of a plan do not exist."""
    if not _speaks():
        return 0
    config = _settings(options, writes=True)
    from megatron_lrl.runtime import quiet_libraries

    quiet_libraries()
    from megatron_lrl.plan.report import plan

    text = plan(
        config,
        world=options.world,
        prompt=options.prompt,
        response=options.response,
        budget=options.budget,
        teraflops=options.tflops,
        out=options.out,
        search_layouts=options.search,
    )
    print(text, flush=True)
    return 0


def _convert(options: argparse.Namespace, runtime: Any) -> int:
    if options.verb == "import":
        from megatron_lrl.checkpoint.hf_import import import_checkpoint
        from megatron_lrl.models.hf_config import LastKVSpec

        chunk = options.lastkv_chunk
        lastkv = None if chunk is None else LastKVSpec(chunk, not options.no_lastkv_blend)
        import_checkpoint(options.source, options.target, runtime, lastkv, options.lastkv_gate_init)
    else:
        from megatron_lrl.adapters.export import export_adapter, holds_adapter
        from megatron_lrl.checkpoint.hf_export import export_checkpoint
        from megatron_lrl.rl.inputs import check_base

        if options.merge:
            runtime.together(check_base, options.source)
        if options.merge or runtime.together(holds_adapter, options.source):
            export_adapter(options.source, options.target, runtime, options.merge)
        else:
            export_checkpoint(options.source, options.target, runtime)
    if runtime.is_main:
        print(f"wrote {options.target}", flush=True)
    return 0


def _run_model(options: argparse.Namespace, config: Any, runtime: Any) -> int:
    """A verb whose function takes config, runtime and the files of its command line."""
    if options.verb == "check":
        from megatron_lrl.checks.report import check

        return 0 if check(config, runtime, options.out) else 1
    from megatron_lrl.rl import train, verbs

    files = [getattr(options, name) for name in ("prompts", "trajectories", "out") if hasattr(options, name)]
    getattr(train if options.verb == "train" else verbs, options.verb)(config, runtime, *files)
    return 0
