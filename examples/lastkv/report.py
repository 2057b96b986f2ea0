"""What the LastKV example learned: held-out loss of the uptraining, and reward of GRPO by where the fact stands.

python examples/lastkv/report.py --uptraining runs/lastkv-uptrain --grpo runs/lastkv-grpo
"""

from __future__ import annotations

import argparse
import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from megatron_lrl.errors import UserError
from megatron_lrl.rollout.journal import JOURNAL
from megatron_lrl.tracking import read_metrics

QUICKSTART = runpy.run_path(str(Path(__file__).parents[1] / "quickstart" / "report.py"))
REGIONS = ("history", "previous chunk", "open chunk")


def main() -> None:
    parser = argparse.ArgumentParser(description="Report what the LastKV example learned.")
    parser.add_argument(
        "--uptraining", type=Path, default=Path("runs/lastkv-uptrain"), help="its train.output"
    )
    parser.add_argument(
        "--grpo", type=Path, default=Path("runs/lastkv-grpo"), help="train.output of the GRPO run"
    )
    parser.add_argument(
        "--hf", type=Path, default=Path(".cache/quickstart/hf"), help="directory of the tokenizer"
    )
    parser.add_argument("--prompts", type=Path, default=Path(".cache/quickstart/prompts.jsonl"))
    parser.add_argument("--chunk", type=int, default=512, help="C")
    args = parser.parse_args()

    losses = read_metrics(args.uptraining)
    if not losses or "lm/held_out_loss_start" not in losses[0]:
        raise UserError(
            f"{args.uptraining} is no run of examples/lastkv/uptrain.toml: it has no held-out loss"
        )
    print("Held-out loss (nats per token) before update 1 and after updates:", end=" ")
    print(f"{losses[0]['lm/held_out_loss_start']:.3f}", end="")
    for record in losses:
        if "lm/held_out_loss" in record:
            print(f", {record['update'] + 1}: {record['lm/held_out_loss']:.3f}", end="")
    print(flush=True)
    updates = read_metrics(args.grpo)
    first, last = QUICKSTART["compare"](updates)
    edge = QUICKSTART["EDGE"]
    print(f"Mean reward, first {edge} -> last {edge} of {len(updates)} updates: {first:.3f} -> {last:.3f}")
    mismatch = [update["mismatch/kl"] for update in updates]
    print(f"KL of sampler and replay: mean {fmean(mismatch):.1e}, largest {max(mismatch):.1e}")
    print(f"\n{'the fact lies in':<16} {'prompts':>7}  mean reward by quarter of the updates")
    found = list(groups(args.grpo, args.prompts, args.hf, args.chunk))
    for region in REGIONS:
        quarters: list[list[float]] = [[], [], [], []]
        for update, where, reward in found:
            if where == region:
                quarters[4 * update // len(updates)].append(reward)
        shown = " ".join(f"{fmean(quarter):6.2f}" if quarter else "  none" for quarter in quarters)
        print(f"{region:<16} {sum(map(len, quarters)):>7}  {shown}")


def groups(run: Path, prompts: Path, hf: Path, chunk: int) -> Iterator[tuple[int, str, float]]:
    """Of every group that the journal holds: its update, the region of its fact, its mean reward."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(hf, trust_remote_code=False)
    with prompts.open(encoding="utf-8") as file:
        answers = {record["id"]: record["answer"][1] for record in map(json.loads, file)}
    for path in sorted((run / JOURNAL).glob("update-*.jsonl")):
        header, *records = map(json.loads, path.read_text(encoding="utf-8").splitlines()[:-1])
        for record in records:
            code = tokenizer.encode(answers[record["id"].rpartition("@")[0]], add_special_tokens=False)
            where = region_of(record["prompt_ids"], code, chunk)
            yield header["update"], where, fmean(response["reward"] for response in record["responses"])


def region_of(prompt_ids: list[int], code: list[int], chunk: int) -> str:
    """Where the first token of the answer finds the code, which stands in the prompt once."""
    place = next(i for i in range(len(prompt_ids)) if prompt_ids[i : i + len(code)] == code)
    back = (len(prompt_ids) - 1) // chunk - place // chunk
    return REGIONS[max(0, 2 - back)]


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
