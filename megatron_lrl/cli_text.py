"""What `--help` says of the verbs."""

from __future__ import annotations

DESCRIPTION = """\
Reinforcement learning of large models on very long prompts, on Megatron-Core.

A prompt is captured once into state that stays on the ranks that read it; each response is replayed
against it.
Every verb also runs on many ranks:  torchrun --nproc-per-node N -m megatron_lrl VERB ...
"""
EXAMPLES = """\
examples:
  megatron-lrl import Qwen3-8B ckpt/qwen3-8b
  torchrun --nproc-per-node 8 -m megatron_lrl train config.toml parallel.tp=2 parallel.cp=4
  megatron-lrl export runs/name/checkpoints/update-000100 Qwen3-8B-rl
  megatron-lrl train --settings          all keys of a config file
  megatron-lrl train --help              what a verb does, its arguments, an example
"""
_SETTINGS = (
    "CONFIG is TOML; a key=value after it replaces a setting of the file. All keys: megatron-lrl train "
    "--settings. "
    "Paths are relative to the working directory."
)
_TARGET = (
    "The target must not exist; it appears only when it is complete. A checkpoint can be read in any "
    "layout: the "
    "sizes here only spread the work."
)
# verb -> (line in the list of verbs, what it does in paragraphs, usage and example after the program's name)
TEXTS: dict[str, tuple[str, tuple[str, ...], str, str]] = {
    "import": (
        "convert a Hugging Face directory to a Megatron distributed checkpoint",
        (
            "Convert a Hugging Face directory (config.json, safetensors, tokenizer) to a Megatron distributed "
            "checkpoint, which `train` and the other verbs read as model.checkpoint.",
            "With --lastkv-chunk a model of full attention becomes a LastKV one: config.json gets the key "
            "lastkv, each attention layer a gate per KV head (a hybrid's recurrent layers stay), and the keys and "
            "values of the last one, which all read as history, become zero. It is not the original function any "
            "more: uptrain it first.",
            _TARGET,
        ),
        "import HF_DIR CKPT_DIR [--tp N] [--pp N]\n"
        "       [--lastkv-chunk C [--no-lastkv-blend] [--lastkv-gate-init A]]",
        "import Qwen3-8B ckpt/qwen3-8b",
    ),
    "export": (
        "convert a checkpoint (of import or train) back to a Hugging Face directory",
        (
            "Convert a checkpoint of `import` or `train` to a Hugging Face directory, with the files of the "
            "original. Weights that were not trained come out bit-equal. The checkpoint of an adapter becomes a "
            "directory that peft and vLLM read, or with --merge a whole model, for which its base must still be "
            "where the run read it.",
            _TARGET,
        ),
        "export CKPT_DIR HF_DIR [--merge] [--tp N] [--pp N]",
        "export runs/name/checkpoints/update-000100 Qwen3-8B-rl",
    ),
    "train": (
        "run updates; resumes from the output folder's newest checkpoint",
        (
            "Run GRPO updates: sample a group of responses for every prompt, reward them, replay them "
            "against the "
            "resident prompt, step. The folder train.output receives checkpoints, TensorBoard and "
            "metrics.jsonl.",
            "The same command again resumes from the newest checkpoint. SIGINT or SIGTERM saves one after the "
            "current update and stops.",
            _SETTINGS,
        ),
        "train CONFIG [key=value ...]",
        "train config.toml train.updates=100 train.output=runs/name",
    ),
    "generate": (
        "sample a group of responses for every prompt of a file",
        (
            "Sample rollout.group_size responses for every prompt of a JSONL file and write them as trajectories, "
            "one group a line: ids, the sampler's log-probabilities, and rewards if the prompts have what "
            "data.reward reads.",
            _SETTINGS,
        ),
        "generate CONFIG --prompts P.jsonl --out T.jsonl [--overwrite] [key=value ...]",
        "generate config.toml --prompts P.jsonl --out T.jsonl rollout.group_size=4",
    ),
    "score": (
        "log-probabilities of recorded responses",
        (
            "Write log softmax(logits / rollout.temperature) of every recorded response token, one group a line: "
            '{"id": ..., "logprobs": [[...], ...]}.',
            _SETTINGS,
        ),
        "score CONFIG --trajectories T.jsonl --out S.jsonl [--overwrite] [key=value ...]",
        "score config.toml --trajectories T.jsonl --out S.jsonl",
    ),
    "grad": (
        "the gradient of one window of recorded responses; no step",
        (
            "Write the gradient of the loss over all recorded groups, as one window, under "
            "prefix.contract: a "
            "safetensors file with Hugging Face names and shapes. No parameter changes.",
            _SETTINGS,
        ),
        "grad CONFIG --trajectories T.jsonl --out G.safetensors [--overwrite] [key=value ...]",
        "grad config.toml --trajectories T.jsonl --out G.safetensors prefix.contract=exact",
    ),
    "check": (
        "consistency report: rollout against replay, contracts against conventional",
        (
            "Sample with the configured model and compare: the sampler's log-probabilities with those of "
            "replay, "
            "and every contract's gradient with that of full sequences. Bars are six times what one ulp of "
            "the weights does to this model. Exit status 1 if a comparison misses its bar.",
            _SETTINGS,
        ),
        "check CONFIG [--out R.json [--overwrite]] [key=value ...]",
        "check config.toml --out report.json",
    ),
    "plan": (
        "bytes per rank by lifetime, what fits, break-even; before launch, without GPUs or weights",
        (
            "Plan a window before it is launched: bytes of every kind of rank by lifetime, the largest "
            "prompt, "
            "response and group that fit a budget, and from where on the contract costs less than "
            "full sequences. Reads the model's config.json only; one process plans for any number of "
            "ranks.",
            _SETTINGS,
        ),
        "plan CONFIG [--world N] [--prompt P] [--response R] [--budget GIB] [--tflops T]\n"
        "                         [--search] [--out R.json [--overwrite]] [key=value ...]",
        "plan config.toml --world 64 --prompt 131072 --budget 139 parallel.tp=4 parallel.cp=8",
    ),
}
