"""Claim: `plan --search` tries every layout that a world, the model and the settings allow, ranks them by the longest
prompt and by the work of a rank, and says each layout's bytes as `plan` says them; many graphs in flight are planned as
the whole pipeline is.

Why the tests show it: layouts are counted by hand for a model of 2 KV heads and 4 layers; bytes are those of a plan of
the layout alone; a stage of a deep pipeline is rehearsed with all its graphs and compared with the straight line.
Not shown: that the ranking is that of measured time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from oracle.tiny_models import make_hf_dir

from megatron_lrl import cli
from megatron_lrl.config import load_config
from megatron_lrl.models.hf_config import read_architecture
from megatron_lrl.plan import graphs
from megatron_lrl.plan.bytes import Work, open_plan_of_stage
from megatron_lrl.plan.search import search

WORK = Work(40, 6, 4, 1)
SETTINGS = ("prefix.chunk_size=8", "train.groups_per_update=4")


@pytest.fixture(scope="module")
def hf(session_dir: Path) -> Path:
    return make_hf_dir(session_dir / "search-model", "qwen3", 3, layers=4)


def test_every_layout_of_four_ranks(hf: Path) -> None:
    config = load_config(
        "/dev/null",
        [f"model.hf={hf}", *SETTINGS, "parallel.tp=2"],
    )
    arch = read_architecture(hf)
    found = search(config, arch, 4, WORK, 2**40)
    # tp divides 2 KV heads, pp divides 4 layers, cp and dp anything: 4 = tp cp pp dp
    sizes = {(c.layout.tp, c.layout.cp, c.layout.pp, c.dp) for c in found}
    assert sizes == {
        (tp, cp, pp, 4 // (tp * cp * pp))
        for tp in (1, 2) for cp in (1, 2, 4) for pp in (1, 2, 4) if 4 % (tp * cp * pp) == 0
    }  # fmt: skip
    assert all(c.longest == arch.max_positions - WORK.response for c in found)
    one = next(c for c in found if (c.layout.tp, c.layout.cp, c.layout.pp) == (2, 2, 1))
    alone = load_config("/dev/null", [f"model.hf={hf}", *SETTINGS, "parallel.tp=2", "parallel.cp=2"])
    with open_plan_of_stage(alone, arch, 4, 0) as plan:
        assert one.peak == plan.bytes_of(WORK).total
    work = {c.name: c.operations for c in found}
    assert work["pp=4"] > work["pp=2 dp=2"] > work["dp=4"]  # bubbles


def test_the_verb_prints_and_writes_it(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f"[model]\nhf = {str(hf)!r}\n")
    words = ["plan", str(config), "--search", "--prompt", "40", "--response", "6"]
    assert cli.main([*words, "--world", "2", "--budget", "4", "--out", str(tmp_path / "r.json")]) == 0
    printed = capsys.readouterr().out
    assert "4 layouts; 4 fit" in printed and "least work" in printed
    assert len(json.loads((tmp_path / "r.json").read_text())["layouts"]) == 4
    assert cli.main(words) == 2 and "--world" in capsys.readouterr().err


@pytest.mark.parametrize("contract", ["exact", "conventional"])
@pytest.mark.parametrize("prompt", [9, 33, 100])
def test_many_graphs_at_once_are_a_straight_line(
    contract: str, prompt: int, hf: Path, monkeypatch: pytest.MonkeyPatch, report: Any
) -> None:
    config = load_config("/dev/null", [f"model.hf={hf}", "prefix.chunk_size=8", "parallel.pp=4"])
    arch = read_architecture(hf)
    found = []
    for few in (3, 99):
        monkeypatch.setattr(graphs, "_FEW_FLIGHTS", few)
        with open_plan_of_stage(config, arch, 4, 0) as plan:
            planned = plan.bytes_of(Work(prompt, 6, 4, 1), contract)
            found.append((planned.replay_graph, planned.sweep_graph))
    line, whole = found
    report("of the line and of all graphs", f"{line}, {whole}")
    for ours, theirs in zip(line, whole, strict=True):
        assert theirs <= ours <= 1.1 * theirs
