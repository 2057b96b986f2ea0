"""Claim: a run with an adapter trains A and B alone, saves them alone, resumes bit-equal (and in other layouts), and
exports a directory that peft loads with our scores, or a merged model; its reference is the policy's own base.

Why the tests show it: every command is the program's own; peft's own class reads what `export` wrote, over
transformers' model; the merged model is peft's `merge_and_unload`; with kl_coef > 0 the run is compared with one whose
reference is a second copy (the merged start of the adapter, trained in full with a rate of zero is not needed: the
first window's KL is that against the base's scores).
Not shown: vLLM; many updates.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cli.runs import Runs, outcomes_of, relative_l2, require_equal_weights, require_same, run
from harness import ONE, World
from oracle import hf_oracle, lora
from oracle.compare import max_difference
from oracle.trajectories import write_jsonl
from safetensors.torch import load_file

LORA = ["adapter.rank=4", "adapter.alpha=8", "optimizer.lr=3e-2", "train.groups_per_update=2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("adapters"))


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def base_scores(hf: Path, groups: list[dict[str, Any]]) -> list[Any]:
    return hf_oracle.score(hf, groups)


@pytest.mark.parametrize("world", [ONE, World(tp=2, dp=2)], ids=lambda world: world.name)
def test_two_and_two_updates_are_four_and_the_base_stays(world: World, runs: Runs) -> None:
    whole, halves = f"whole-{world.name}", f"halves-{world.name}"
    settings = [*LORA, "loss.kl_coef=0.05", *world.overrides]
    before = (runs.model / "model.safetensors").read_bytes()
    said = run(
        runs.train(whole, *settings, "train.updates=4"),
        runs.train(halves, *settings, "train.updates=2"),
        runs.train(halves, *settings, "train.updates=4"),
        runs.export(whole, 4),
        runs.export(halves, 4),
        world=world,
    )
    assert "at update 2" in said[2]
    require_same(runs.computed(halves), runs.computed(whole))
    ours, theirs = adapter_of(runs.exported(halves, 4)), adapter_of(runs.exported(whole, 4))
    require_equal_weights(ours, theirs)
    moved = [name for name, x in ours.items() if "lora_B" in name and bool(x.any())]
    assert len(moved) == len(ours) // 2  # every B left zero
    assert (runs.model / "model.safetensors").read_bytes() == before
    stored = {path.suffix: path.stat().st_size for path in runs.checkpoint(whole, 4).glob("*.distcp")}
    assert sum(stored.values()) < 40 * sum(x.nbytes for x in ours.values())
    assert runs.metrics(whole)[0]["loss/kl"] == 0.0  # the first policy is its base
    assert runs.metrics(whole)[-1]["loss/kl"] > 0.0


def test_a_run_goes_on_in_another_layout(runs: Runs) -> None:
    run(runs.train("moved", *LORA, "train.updates=2"))
    run(
        runs.train("moved", *LORA, "train.updates=3", "parallel.tp=2", "parallel.pp=2"),
        world=World(tp=2, pp=2),
    )
    run(runs.train("stayed", *LORA, "train.updates=3"))
    run(runs.export("moved", 3), runs.export("stayed", 3), runs.export("moved", 2))
    ours, theirs = adapter_of(runs.exported("moved", 3)), adapter_of(runs.exported("stayed", 3))
    assert relative_l2(ours, theirs) < 1e-4
    assert relative_l2(adapter_of(runs.exported("moved", 2)), theirs) > 1e-3


def test_peft_loads_what_export_writes_and_merges_as_we_do(runs: Runs, report: Any) -> None:
    import peft

    run(runs.train("peft", *LORA, "train.updates=2"), runs.export("peft", 2))
    merged = runs.root / "merged"
    run(["export", str(runs.checkpoint("peft", 2)), str(merged), "--merge"])
    adapter = runs.exported("peft", 2)
    groups = [{"id": "g", "prompt_ids": list(range(3, 30)), "responses": [{"ids": [5, 9, 77, 8]}]}]
    file = write_jsonl(runs.root / "one.jsonl", groups)
    out = runs.root / "scores.jsonl"
    run(
        ["score", str(runs.config), "--trajectories", str(file), "--out", str(out), f"adapter.path={adapter}"]
    )
    ours = json.loads(out.read_text())["logprobs"]
    base = transformers.AutoModelForCausalLM.from_pretrained(
        runs.model, dtype=torch.float32, attn_implementation="eager"
    )
    loaded = peft.PeftModel.from_pretrained(base, adapter).eval()
    fed = [*groups[0]["prompt_ids"], *groups[0]["responses"][0]["ids"]]
    with torch.no_grad():
        logits = loaded(torch.tensor([fed])).logits[0].log_softmax(-1)
    theirs = [float(logits[26 + i, token]) for i, token in enumerate(groups[0]["responses"][0]["ids"])]
    distance = (
        max_difference([[ours]], [[[theirs]]])
        if False
        else max(abs(a - b) for a, b in zip(ours[0], theirs, strict=True))
    )
    report("scores of peft's own model, largest difference", distance)
    assert distance <= 2e-5
    assert max(abs(a - b) for a, b in zip(ours[0], base_scores(runs.model, groups)[0][0], strict=True)) > 1e-3
    unloaded = loaded.merge_and_unload()
    stored = load_file(merged / "model.safetensors")
    names = {name: p for name, p in unloaded.named_parameters() if name in stored}
    assert relative_l2({n: stored[n] for n in names}, {n: p.detach() for n, p in names.items()}) < 1e-7
    plain = hf_oracle.score(merged, groups)[0][0]
    assert max(abs(a - b) for a, b in zip(ours[0], plain, strict=True)) <= 2e-5


@pytest.mark.parametrize("world", [World(tp=2, pp=2)], ids=lambda world: world.name)
def test_a_directory_of_peft_comes_back_as_it_came(world: World, runs: Runs) -> None:
    """Through a run that takes one step of rate zero, its checkpoint in another layout, and out on one rank."""
    leaves = ("q_proj", "v_proj", "down_proj")
    adapter = lora.write_adapter(runs.model, runs.root / "theirs", leaves, use_rslora=True)
    settings = [
        f"adapter.path={adapter}",
        "optimizer.lr=1e-30",
        "train.updates=1",
        "train.groups_per_update=2",
    ]
    run(runs.train("back", *settings, *world.overrides), world=world)
    run(runs.export("back", 1))
    require_equal_weights(adapter_of(runs.exported("back", 1)), adapter_of(adapter))
    config = json.loads((runs.exported("back", 1) / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(leaves) and config["use_rslora"] is True


REFUSED = {
    "rank twice": (["adapter.path=theirs2", "adapter.rank=4"], "adapter.rank is the directory's own"),
    "target": (["adapter.rank=2", 'adapter.targets=["q_proj", "wq"]'], "valid with this model: down_proj"),
    "bias": (["adapter.path=bias"], "bias = 'all' is not implemented"),
    "module": (["adapter.path=module"], "model.layers.7.self_attn.q_proj"),
    "half": (["adapter.path=half"], "is missing"),
    "shape": (["adapter.path=shape"], "need a floating one of"),
    "nowhere": (["adapter.path=nowhere"], "adapter_config.json"),
    "router": (["adapter.rank=2", "moe.router_bias_update_rate=0.1"], "frozen under [adapter]"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_adapter_cannot_be_is_refused(case: str, runs: Runs) -> None:
    more, message = REFUSED[case]
    made = lora.write_adapter(runs.model, runs.root / "theirs2", ("q_proj",))
    tensors = adapter_of(made)
    first = next(iter(tensors))
    changes = {
        "bias": ({}, {"bias": "all"}),
        "module": ({n.replace("layers.1", "layers.7"): x for n, x in tensors.items()}, {}),
        "half": ({n: x for n, x in tensors.items() if n != first}, {}),
        "shape": ({**tensors, first: tensors[first][:, :-1].contiguous()}, {}),
    }
    if case in changes:
        from safetensors.torch import save_file

        folder = lora.write_adapter(runs.model, runs.root / case, ("q_proj",), **changes[case][1])
        if changes[case][0]:
            save_file(changes[case][0], folder / "adapter_model.safetensors", metadata={"format": "pt"})
    more = [
        f"adapter.path={runs.root / m.removeprefix('adapter.path=')}" if "path=" in m else m for m in more
    ]
    out = f"refused-{case.replace(' ', '-')}"
    (outcome,) = outcomes_of(ONE, [runs.train(out, *more)])[0]
    assert outcome[0] == 2, outcome
    assert message in outcome[2], outcome[2]
    assert not (runs.root / out / "checkpoints").exists()


def test_an_adapters_checkpoint_is_not_taken_for_a_model(runs: Runs) -> None:
    run(runs.train("alone", *LORA, "train.updates=1"))
    checkpoint = runs.checkpoint("alone", 1)
    words = runs.train("second", "train.updates=1", f"model.checkpoint={checkpoint}")
    (outcome,) = outcomes_of(ONE, [words])[0]
    assert outcome[0] == 2 and "holds an adapter, not a model" in outcome[2], outcome
    config = runs.model / "generation_config.json"
    config.write_text("{}")
    try:
        words = ["export", str(checkpoint), str(runs.root / "never"), "--merge"]
        (outcome,) = outcomes_of(ONE, [words])[0]
        assert outcome[0] == 2 and "other content" in outcome[2], outcome
    finally:
        config.unlink()
    assert not (runs.root / "never").exists()
