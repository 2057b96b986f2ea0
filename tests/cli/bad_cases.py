"""Everything a user can get wrong, by kind: a command line and what its one message must name."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import World
from oracle.tiny_models import make_hf_dir
from oracle.trajectories import window, write_jsonl
from safetensors.torch import load_file, save_file

from cli.runs import outcomes_of

# One refusal takes well below a second; the bars leave room for a machine that runs much else.
PROCESSOR_SECONDS, SECONDS = 10.0, 100.0
VOCAB, POSITIONS = 61, 64


class Case(NamedTuple):
    """A command line with something wrong, and what its message must name."""

    arguments: list[str]
    named: tuple[str, ...]


class Place:
    """A folder with a good model, good inputs and a good configuration to spoil."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = make_hf_dir(
            root / "model",
            "llama",
            1,
            vocab=VOCAB,
            layers=2,
            hidden=16,
            intermediate=16,
            max_positions=POSITIONS,
        )
        self.prompts = write_jsonl(
            root / "p.jsonl", [{"id": f"p{i}", "prompt_ids": [3, 5, i]} for i in range(3)]
        )
        self.groups = window(5, VOCAB, ((5, (2, 3)), (4, (1, 2))))
        self.trajectories = write_jsonl(root / "t.jsonl", self.groups)
        self.config = root / "c.toml"
        self.config.write_text(
            f"[model]\nhf = {str(self.model)!r}\n[rollout]\ngroup_size = 2\nmax_new_tokens = 4\n"
            f"[train]\nupdates = 1\noutput = {str(root / 'run')!r}\n"
            f"[data]\nprompts = {str(self.prompts)!r}\nreward = 'cli.toy_rewards:low_ids'\n"
        )

    def train(self, *overrides: str) -> list[str]:
        return ["train", str(self.config), *overrides]

    def grad(
        self, *overrides: str, trajectories: Path | None = None, out: str = "g.safetensors"
    ) -> list[str]:
        return self._recorded("grad", overrides, trajectories, out)

    def score(self, *overrides: str, trajectories: Path | None = None, out: str = "s.jsonl") -> list[str]:
        return self._recorded("score", overrides, trajectories, out)

    def _recorded(self, verb: str, overrides: Any, trajectories: Path | None, out: str) -> list[str]:
        words = [verb, str(self.config), *overrides, "--trajectories", str(trajectories or self.trajectories)]
        return [*words, "--out", str(self.root / out)]

    def generate(self, *overrides: str, prompts: Path | None = None, out: str = "o.jsonl") -> list[str]:
        words = ["generate", str(self.config), *overrides, "--prompts", str(prompts or self.prompts)]
        return [*words, "--out", str(self.root / out)]

    def copy_of_model(self, name: str) -> Path:
        return shutil.copytree(self.model, self.root / name)

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.write_text(text)
        return path

    def recorded(self, name: str, change: Callable[[dict[str, Any]], None]) -> Path:
        """The trajectories with a change to the second group, line 2."""
        groups = json.loads(json.dumps(self.groups))
        change(groups[1])
        return write_jsonl(self.root / name, groups)


def settings_cases(place: Place) -> list[Case]:
    """Unknown keys, wrong types, impossible layouts, places that are no files."""
    broken = place.write("broken.toml", "[train\nupdates = 3\n")
    two = place.write("two.toml", "[model]\nhf = 'a'\ncheckpoint = 'b'\n")
    none = place.write("none.toml", "[train]\nupdates = 2\n")
    return [
        Case(place.train("train.update=3"), ("train.update", "did you mean train.updates?")),
        Case(place.train("updates.train=3"), ("unknown key updates", "valid: model")),
        Case(place.train("train.updates=soon"), ("train.updates", "integer", "'soon'")),
        Case(place.train("train.updates=1.5"), ("train.updates", "integer")),
        Case(place.train("rollout.temperature=0"), ("rollout.temperature", "> 0")),
        Case(place.train("rollout.temperature=nan"), ("rollout.temperature", "> 0")),
        Case(place.train("prefix.contract=full"), ("prefix.contract", '"response_only"')),
        Case(place.train("train=3"), ("train",)),
        Case(place.train("data.reward=exact_match"), ("data.reward", "module:function")),
        Case(place.train("data.reward=cli.toy_rewards:absent"), ("data.reward", "absent")),
        Case(place.train("data.reward=cli.no_module:f"), ("data.reward", "cli.no_module")),
        Case(place.train("data.reward_args.under=3"), ("data.reward_args", "under")),
        Case(place.train("data.reward=megatron_lrl.rl.rewards:exact_match"), ("'p0'", "'answer'")),
        Case(place.train("rollout.group_size=1"), ("rollout.group_size", "at least 2")),
        Case(place.train("model.attention=last"), ("model.attention", '"full", "lastkv"')),
        Case(["train", str(broken)], ("broken.toml", "TOML", "line 1")),
        Case(["train", str(two)], ("model.hf", "model.checkpoint")),
        Case(["train", str(none)], ("model.hf",)),
        Case(["train", str(place.root / "absent.toml")], ("absent.toml", "No such file")),
        Case(["train", str(place.root)], (str(place.root), "directory")),
        Case(place.train("model.hf=nowhere"), ("nowhere",)),
        Case(place.train(f"model.hf={place.root}"), ("config.json",)),
        Case(place.train("model.checkpoint=nowhere"), ("nowhere",)),
        Case(place.train("parallel.tp=3"), ("parallel.tp = 3", "world")),
        Case(place.train("parallel.pp=8"), ("parallel.pp = 8", "multiple of 8")),
        Case(place.train("parallel.ep=2"), ("parallel.ep = 2",)),
        Case(["import", str(place.model), str(place.root / "ckpt"), "--tp", "5"], ("tp = 5", "world")),
    ]


def model_cases(place: Place) -> list[Case]:
    """Weights and descriptions that are not the model's."""
    cases = []

    def spoiled(name: str, change: Callable[[Path], None], *named: str) -> None:
        model = place.copy_of_model(name)
        change(model)
        cases.append(Case(place.grad(f"model.hf={model}"), named))
        cases.append(Case(["import", str(model), str(place.root / f"{name}-ckpt")], named))
        cases.append(Case(place.train(f"model.hf={model}"), named))

    def truncate(model: Path) -> None:
        os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size - 100)

    def reshape(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        tensors["model.norm.weight"] = torch.ones(17)
        save_file(tensors, model / "model.safetensors", {"format": "pt"})

    def lose(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, model / "model.safetensors", {"format": "pt"})

    def damage(file: str, text: str) -> Callable[[Path], None]:
        def write(model: Path) -> None:
            (model / file).write_text(text)

        return write

    spoiled("no-weights", lambda m: (m / "model.safetensors").unlink(), "no-weights", "safetensors")
    spoiled("cut", truncate, "model.safetensors", "truncated")
    spoiled("reshaped", reshape, "model.norm.weight", "[17]", "[16]")
    spoiled("lost", lose, "model.layers.1.mlp.up_proj.weight")
    spoiled("no-json", damage("config.json", "{"), "config.json")
    up = "model.layers.1.mlp.up_proj.weight"
    for name, value in (("nan", math.nan), ("overflow", 1e38)):
        tensors = load_file(place.model / "model.safetensors")
        tensors[up].fill_(value)
        tensors["model.layers.1.mlp.gate_proj.weight"].mul_(1e30)
        save_file(tensors, place.copy_of_model(name) / "model.safetensors", {"format": "pt"})
    cases.append(Case(place.score(f"model.hf={place.root / 'nan'}"), ("model.safetensors", up, "NaN")))
    overflow = place.root / "overflow"
    for arguments in (
        place.score(f"model.hf={overflow}"),
        place.generate(f"model.hf={overflow}"),
        place.grad(f"model.hf={overflow}"),
        ["check", str(place.config), f"model.hf={overflow}"],
    ):
        cases.append(Case(arguments, ("overflow", "is nan", "not finite")))
    for name, file, text in (
        ("generation", "generation_config.json", "{"),
        ("eos", "generation_config.json", '{"eos_token_id": ["</s>"]}'),
        ("tokenizer", "tokenizer.json", "{"),
    ):
        model = place.copy_of_model(name)
        damage(file, text)(model)
        named = ("tokenizer",) if name == "tokenizer" else (file,)
        cases.append(Case(place.train(f"model.hf={model}"), named))
        cases.append(Case(place.generate(f"model.hf={model}"), named))

    sharded = make_hf_dir(
        place.root / "sharded", "llama", 1, vocab=VOCAB, layers=2, hidden=16, intermediate=16,
        max_positions=POSITIONS, max_shard_size="4KB",
    )  # fmt: skip
    shards = sorted(sharded.glob("model-*.safetensors"))
    shards[1].unlink()
    cases.append(Case(place.score(f"model.hf={sharded}"), (shards[1].name, "no such file")))
    return cases


def data_cases(place: Place) -> list[Case]:
    """Trajectories and prompts, each with a fault in line 2."""
    cases = []

    def recorded(name: str, change: Callable[[dict[str, Any]], None], *named: str) -> None:
        path = place.recorded(f"{name}.jsonl", change)
        for arguments in (place.score(trajectories=path), place.grad(trajectories=path)):
            cases.append(Case(arguments, (f"{name}.jsonl:2", *named)))

    def response(**fields: Any) -> Callable[[dict[str, Any]], None]:
        return lambda group: group["responses"][1].update(fields)

    recorded("outside", lambda g: g["prompt_ids"].append(VOCAB), f"{VOCAB} is outside", "0 to 60")
    recorded("negative", response(ids=[3, -1]), "responses[1]", "-1 is outside")
    recorded("no-prompt", lambda g: g.update(prompt_ids=[]), "prompt_ids", "empty")
    recorded("no-response", response(ids=[]), "responses[1]", "empty")
    recorded("no-responses", lambda g: g.update(responses=[]), "responses", "non-empty")
    recorded("few-logprobs", response(logprobs=[-1.0]), "logprobs", "(2)", "1 values")
    recorded("nan-reward", response(reward=math.nan), "reward", "finite")
    recorded("inf-advantage", response(advantage=-math.inf), "advantage", "finite")
    recorded("text", response(ids=["a", "b"]), "integer")
    recorded("twice", lambda g: g.update(id="g0"), "g0", "line 1")
    recorded("long", lambda g: g.update(prompt_ids=[1] * POSITIONS), "64 positions")
    recorded("misspelt", lambda g: g.update(response=g.pop("responses")), "responses")

    def forget(group: dict[str, Any]) -> None:
        for response in group["responses"]:
            del response["advantage"]
        del group["responses"][0]["reward"]

    no_reward = place.recorded("no-reward.jsonl", forget)
    cases.append(Case(place.grad(trajectories=no_reward), ("g1", "reward")))
    cases.append(Case(place.grad("loss.importance_cap=2"), ("loss.importance_cap", "logprobs")))

    good = place.trajectories.read_text().splitlines()
    malformed = place.write("malformed.jsonl", f"{good[0]}\n{good[1][:-9]}\n")
    cases.append(Case(place.score(trajectories=malformed), ("malformed.jsonl:2", "JSON")))
    cases.append(
        Case(place.score(trajectories=place.write("empty.jsonl", "\n")), ("empty.jsonl", "no groups"))
    )
    cases.append(Case(place.score(trajectories=place.root / "absent.jsonl"), ("absent.jsonl",)))
    cases.append(Case(place.score(trajectories=place.root), (str(place.root),)))
    (place.root / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    cases.append(Case(place.score(trajectories=place.root / "binary.jsonl"), ("binary.jsonl:1",)))

    for name, line, named in (
        ("cut", '{"prompt_ids": [1, 2', ("JSON",)),
        ("none", '{"id": "x"}', ("exactly one of prompt_ids",)),
        ("empty", '{"prompt_ids": []}', ("empty",)),
        ("outside", '{"prompt_ids": [1, 61]}', ("61 is outside",)),
        ("text", '{"prompt": "hello"}', ("tokenizer",)),
        ("long", json.dumps({"prompt_ids": [1] * (POSITIONS - 3)}), ("max_new_tokens", "64 positions")),
    ):
        path = place.write(f"prompts-{name}.jsonl", f'{{"prompt_ids": [4]}}\n{line}\n')
        for arguments in (place.train(f"data.prompts={path}"), place.generate(prompts=path)):
            cases.append(Case(arguments, (f"{path.name}:2", *named)))
    cases.append(Case(place.train("data.prompts=absent.jsonl"), ("absent.jsonl",)))
    return cases


def output_cases(place: Place) -> list[Case]:
    """Places that cannot be written, or must not be."""
    foreign = place.root / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    other = place.root / "other-run"
    own = shutil.copytree(place.model, other / "checkpoints" / "update-000001")
    damaged = place.root / "damaged-run"
    damaged.mkdir()
    for folder, text in ((other, '{"optimizer": {"lr": 1.0}}'), (damaged, "{")):
        (folder / "config.json").write_text(text)
        (folder / "metrics.jsonl").write_text('{"update": 0}\n')
    under = f"{place.config}/run"
    unwritable = "/proc/run"  # not even root creates a folder there
    return [
        Case(place.train(f"train.output={under}"), ("train.output", "c.toml is not a folder")),
        Case(place.train(f"train.output={unwritable}"), ("train.output", "/proc")),
        Case(place.train(f"train.output={place.config}"), ("train.output", "not a folder")),
        Case(place.train(f"train.output={foreign}"), ("foreign", "holds no run")),
        Case(place.train(f"train.output={foreign}", "train.overwrite=true"), ("foreign", "holds no run")),
        Case(
            place.train(f"train.output={other}"), ("other-run", "another", "optimizer.lr", "train.overwrite")
        ),
        Case(place.train(f"train.output={damaged}"), ("damaged-run", "config.json")),
        Case(
            place.train(f"train.output={other}", "train.overwrite=true", f"model.hf={own}"),
            ("train.overwrite", "model.hf"),
        ),
        Case(place.score(out="t.jsonl"), ("t.jsonl", "is read")),
        Case(place.generate(out="p.jsonl"), ("p.jsonl", "is read")),
        Case(place.score(out="foreign"), ("foreign", "folder")),
        Case(place.grad(out="absent/g.safetensors"), ("absent", "does not exist")),
        Case(place.grad(out="c.toml/g.safetensors"), ("c.toml", "does not exist")),
        Case([*place.score()[:-1], "/proc/s.jsonl"], ("/proc",)),
        Case(["import", str(place.model), str(foreign)], ("foreign", "not an empty directory")),
        Case(["import", str(place.model), f"{place.config}/ckpt"], ("c.toml/ckpt",)),
        Case(["export", str(place.model), str(place.root / "hf")], ("model", "checkpoint")),
        Case(["export", str(place.root / "absent"), str(place.root / "hf")], ("absent",)),
    ]


def snapshot(root: Path) -> dict[str, str]:
    """Every path below a folder with the hash of its content."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in sorted(root.rglob("*"))
    }


def require_refused(world: World, place: Place, cases: list[Case]) -> float:
    """Runs the cases in one world; all faults at once in the failure. Returns the slowest case's
    processor seconds."""
    before = snapshot(place.root)
    ranks = outcomes_of(world, [case.arguments for case in cases])
    faults = []
    for case, outcomes in zip(cases, zip(*ranks, strict=True), strict=True):
        told = " ".join(case.arguments).replace(str(place.root), "")
        codes, _, errors, seconds, busy = zip(*outcomes, strict=True)
        first = errors[0]
        if set(codes) != {2}:
            faults.append(f"{told}\n  exit codes {codes}")
        if first.count("error: ") != 1 or not first.startswith("error: ") or any(errors[1:]):
            faults.append(f"{told}\n  not one message of rank 0: {errors}")
        if any("Traceback" in text for text in errors):
            faults.append(f"{told}\n  traceback: {errors}")
        if missing := [name for name in case.named if name not in first]:
            faults.append(f"{told}\n  does not name {missing}: {first}")
        if max(seconds) > SECONDS or max(busy) > PROCESSOR_SECONDS:
            faults.append(f"{told}\n  took {max(seconds):.1f} s, {max(busy):.1f} s of the processor")
    after = snapshot(place.root)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        faults.append(f"written or overwritten: {changed}")
    assert not faults, "\n".join(faults)
    return max(outcome[4] for outcomes in ranks for outcome in outcomes)


KINDS = {"settings": settings_cases, "model": model_cases, "data": data_cases, "output": output_cases}
