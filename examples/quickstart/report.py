"""What the quickstart learned: reward of the first and last updates, and an answer before and after training.

Both answers come from plain transformers, so that the exported directory is shown to need nothing of ours.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_lrl.rl.rewards import contains
from megatron_lrl.tracking import TENSORBOARD_FOLDER, read_metrics

EDGE = 5  # updates compared at each end
NEW_TOKENS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description="Report what the quickstart learned.")
    parser.add_argument("--run", type=Path, required=True, help="train.output of the run")
    parser.add_argument("--before", type=Path, required=True, help="Hugging Face directory of the base model")
    parser.add_argument("--after", type=Path, required=True, help="Hugging Face directory that export wrote")
    parser.add_argument("--prompts", type=Path, required=True, help="held-out prompts (JSONL)")
    args = parser.parse_args()

    updates = read_metrics(args.run)
    first, last = compare(updates)
    with args.prompts.open(encoding="utf-8") as file:
        record = json.loads(next(file))
    print(f"\nHeld-out prompt of {record['tokens']} tokens, ending in {record['prompt'][-60:]!r}")
    for label, folder in (("before", args.before), ("after", args.after)):
        text = answer(folder, record["prompt"])
        print(f"  {label:<7}{text!r}  (reward {contains(text, record, partial=0.2):.1f})")
    print(f"  right   {record['answer'][0]!r}")
    print(f"\nMean reward, first {EDGE} -> last {EDGE} of {len(updates)} updates:", end=" ")
    print(f"{first:.3f} -> {last:.3f} ({last - first:+.3f})")
    print(f"Trained model (Hugging Face directory): {args.after}")
    print(f"Curves: .venv/bin/tensorboard --logdir {args.run / TENSORBOARD_FOLDER}")


def compare(updates: list[dict[str, Any]]) -> tuple[float, float]:
    """Mean of reward/mean over the first and over the last EDGE updates."""
    if len(updates) < 2 * EDGE:
        raise SystemExit(f"the run has {len(updates)} updates; comparing its ends needs at least {2 * EDGE}")
    rewards = [update["reward/mean"] for update in updates]
    return fmean(rewards[:EDGE]), fmean(rewards[-EDGE:])


def answer(folder: Path, prompt: str) -> str:
    """The model's likeliest continuation of a prompt."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=False).eval()
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main()
