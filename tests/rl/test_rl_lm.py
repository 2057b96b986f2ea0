"""Claim: next-token training sees each document alone, from position 0; its gradient is that of the mean cross entropy.

Why the tests show it: the gradient of one update is compared with a plain float64 transformer that runs every packed
part by itself; with LastKV with the chunk-parallel reference, part by part, so a clock or a key that leaked from one
document into the next would show. Packing is checked on streams whose tokens name their place. The held-out loss is the
same oracle's before the first step, and after it the training loss of the same documents one update later.
Not shown: that uptraining helps a real model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import ONE, World
from harness.verbs import run_verb
from hypothesis import given, settings
from hypothesis import strategies as st
from lifetimes.tiny import tiny_run
from oracle.compare import compare_tensors
from oracle.lastkv_reference import ChunkParallel, gate_name
from oracle.plain_fp64 import PlainModel
from oracle.tiny_models import write_case

from megatron_lrl.checkpoint.hf_export import gather_hf_tensors, parameter_gradient
from megatron_lrl.config import check_train, load_config
from megatron_lrl.errors import UserError
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.rl.lm import LmTrainer
from megatron_lrl.rl.lm_data import Corpus, load_corpus
from megatron_lrl.rl.stopwatch import Stopwatch
from megatron_lrl.settings import LmTable
from megatron_lrl.tracking import read_metrics

DOCUMENTS = [[(7 * j + i) % 131 for j in range(n)] for i, n in enumerate((37, 51, 40, 2, 19))]


@given(st.lists(st.integers(2, 30), min_size=1, max_size=8), st.integers(2, 40), st.booleans())
@settings(max_examples=60, deadline=None)
def test_an_epoch_holds_each_token_once_and_parts_never_mix_documents(
    lengths: list[int], length: int, shuffle: bool
) -> None:
    documents = [[1000 * i + j for j in range(n)] for i, n in enumerate(lengths)]
    corpus = Corpus(documents, seed=3, shuffle=shuffle)
    count = max(1, corpus.tokens // length)
    seen: list[int] = []
    for number in range(count):
        parts = corpus.sequence(number, length)
        assert sum(map(len, parts)) <= length
        for part in parts:
            assert len(part) > 1 and part == list(range(part[0], part[0] + len(part)))
            assert len({token // 1000 for token in part}) == 1
        seen += [token for part in parts for token in part]
    assert len(seen) == len(set(seen))
    assert corpus.sequence(count, length) == corpus.sequence(count, length)  # the next epoch, reproducible


@pytest.mark.parametrize("contract", ["conventional", "exact"])
@pytest.mark.parametrize("chunk", [None, 8])
def test_gradient_is_that_of_each_document_alone(
    chunk: int | None, contract: str, tmp_path: Path, report: Any
) -> None:
    overrides = [f"prefix.contract={contract}", "lm.sequence_length=64", "lm.sequences_per_update=2"]
    if chunk:
        overrides += ["model.attention=lastkv", f"lastkv.chunk_size={chunk}", "lastkv.gate_init=0.3"]
    corpus = Corpus(DOCUMENTS, seed=0, shuffle=False)
    with tiny_run(tmp_path, *overrides) as run, UpdateWindow(run) as window:
        loss, tokens = LmTrainer(run, corpus)._accumulate(window, 0, Stopwatch())
        window.reduce()
        assert window.gradient_finite()
        ours = dict(gather_hf_tensors(run.model, run.arch, run.runtime, parameter_gradient))
        folder = Path(run.config.model.hf or "")
        parts = [part for number in range(2) for part in corpus.sequence(number, 64)]
    assert tokens == sum(len(part) - 1 for part in parts)
    expected_loss, expected = _expected(folder, parts, tokens, chunk)
    comparison = compare_tensors(ours, expected)
    report(f"lm gradient, {'lastkv' if chunk else 'full'}, {contract}", str(comparison))
    assert abs(loss - expected_loss) < 1e-10
    comparison.require(1e-10, 1e-9)


def _oracle(folder: Path, chunk: int | None) -> PlainModel:
    """The plain float64 model; with LastKV as a conversion starts it, chunk by chunk: alpha = 0.3 everywhere, keys and
    values of the last layer zero."""
    if not chunk:
        return PlainModel(folder)
    # The program rounds alpha's logit to the dtype of the source's weights when it converts.
    gate_K = torch.logit(torch.tensor([0.3] * 2, dtype=torch.float64)).float().double()
    model = ChunkParallel(folder, {gate_name(layer): gate_K.clone() for layer in range(4)}, chunk)
    emptied = [
        name
        for name in model.weights
        if "layers.3.self_attn.k_proj" in name or "layers.3.self_attn.v_proj" in name
    ]
    with torch.no_grad():
        for name in emptied:
            model.weights[name].zero_()
    assert len(emptied) == 2
    return model


def _expected(
    folder: Path, parts: list[list[int]], tokens: int, chunk: int | None
) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean cross entropy and its gradient, every part by itself, in float64."""
    model = _oracle(folder, chunk)
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        total = total - model.logprobs(part[:1], part[1:]).sum() / tokens
    total.backward()
    return float(total), {
        name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in model.weights.items()
    }


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.jsonl", None, ["no such file", ".idx"]),
        ("bad.jsonl", '{"ids": [1, 2]}\nnot json', ["bad.jsonl:2", "not valid JSON"]),
        ("true.jsonl", '{"ids": [1, true]}', ["true.jsonl:1", "found True"]),
        ("deep.jsonl", "[" * 100_000, ["deep.jsonl:1", "nested more than 100 deep"]),
        ("vocab.jsonl", '{"ids": [1, 999]}', ["vocab.jsonl:1", "0 to 130"]),
        ("key.jsonl", '{"body": "x"}', ["key.jsonl:1", '"text"']),
        ("short.jsonl", '{"ids": [1]}', ["at least two tokens"]),
        ("text.txt", "hello", ["needs a tokenizer"]),
        ("kind.csv", "a,b", ["valid: .txt, .jsonl"]),
    ],
)
def test_bad_files_are_named(name: str, content: str | None, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as caught:
        load_corpus(LmTable(data=str(path), sequence_length=16), None, 131, 1024, 0, False)
    assert all(word in str(caught.value) for word in words)


def test_lines_end_at_line_feeds_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(
        '\ufeff{"ids": [1, 2], "note": "a\u2028b\u0085c"}\n{"ids": [3, 4, 5]}\n', encoding="utf-8"
    )
    corpus = load_corpus(LmTable(data=str(path), sequence_length=16), None, 131, 1024, 0, False)
    assert corpus.documents == [[1, 2], [3, 4, 5]]


@pytest.mark.parametrize("damage", ["cut", "magic", "count", "empty"])
def test_damaged_indexed_datasets_are_named(
    damage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix, index = tmp_path / "corpus", tmp_path / "corpus.idx"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    builder.add_document(torch.tensor([1, 2, 3]), [3])
    builder.finalize(str(index))
    content = index.read_bytes()
    if damage == "empty":
        (tmp_path / "corpus.bin").write_bytes(b"")
    else:
        changed = {
            "cut": content[:-3],
            "magic": b"x" + content[1:],
            "count": content[:18] + b"\x09" + content[19:],
        }
        index.write_bytes(changed[damage])
    with pytest.raises(UserError, match=r"lm\.data = .*corpus: "):
        load_corpus(LmTable(data=str(prefix), sequence_length=64), None, 131, 1024, 0, False)
    assert "Traceback" not in capfd.readouterr().err  # nor one that Python ignores


def test_megatron_indexed_datasets_are_read(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = tmp_path / "corpus"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for document in DOCUMENTS:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    corpus = load_corpus(LmTable(data=str(prefix), sequence_length=64), None, 131, 1024, 0, False)
    plain = Corpus(DOCUMENTS, 0, False)
    assert [corpus.sequence(i, 64) for i in range(2)] == [plain.sequence(i, 64) for i in range(2)]
    lines = tmp_path / "same.jsonl"
    lines.write_text("".join(json.dumps({"ids": document}) + "\n" for document in DOCUMENTS))
    same = load_corpus(LmTable(data=str(lines), sequence_length=64), None, 131, 1024, 0, False)
    assert same.sequence(1, 64) == plain.sequence(1, 64)


@pytest.mark.parametrize(
    ("chunk", "world"),
    [(None, ONE), (8, World(dp=2)), (8, World(cp=2)), (8, World(pp=2))],
    ids=lambda value: value.name if isinstance(value, World) else f"C{value}",
)
def test_held_out_loss_is_that_of_the_model_after_each_step(
    chunk: int | None, world: World, tmp_path: Path, report: Any
) -> None:
    """The run trains on the documents that another file holds out, all in every update: the loss before a step
    is the held-out loss after the step before, and the first is the oracle's."""
    lines = "".join(json.dumps({"ids": document}) + "\n" for document in DOCUMENTS)
    for name in ("data", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text(lines)
    model, config = write_case(tmp_path, "qwen3"), tmp_path / "lm.toml"
    config.write_text(
        f'[model]\nhf = "{model}"\n[optimizer]\nlr = 1e-2\n[data]\nshuffle = false\n[prefix]\ncontract = "exact"\n'
        f'[train]\nobjective = "lm"\nupdates = 4\nsave_every = 0\noutput = "{tmp_path / "run"}"\n'
        f'[lm]\ndata = "{tmp_path / "data.jsonl"}"\nheld_out = "{tmp_path / "held_out.jsonl"}"\n'
        "sequence_length = 49\nsequences_per_update = 3\neval_every = 2\n"  # 149 tokens: three sequences, two left
    )
    lastkv = ["model.attention=lastkv", f"lastkv.chunk_size={chunk}", "lastkv.gate_init=0.3"] if chunk else []
    outcome = run_verb(world, ["train", config, *lastkv, *world.overrides]).require_success()
    records = read_metrics(tmp_path / "run")
    losses = [record["lm/loss"] for record in records]
    assert [sorted(n for n in record if "held_out_loss" in n) for record in records] == [
        ["lm/held_out_loss_start"], ["lm/held_out_loss"], [], ["lm/held_out_loss"],
    ]  # fmt: skip
    corpus = Corpus(DOCUMENTS, 0, False)
    parts = [part for number in range(3) for part in corpus.sequence(number, 49)]
    expected, _ = _expected(model, parts, sum(len(part) - 1 for part in parts), chunk)
    report(
        f"held-out loss against the oracle, {world.name}",
        abs(records[0]["lm/held_out_loss_start"] - expected),
    )
    assert abs(records[0]["lm/held_out_loss_start"] - expected) < 1e-5
    assert abs(losses[0] - expected) < 1e-5
    assert abs(records[1]["lm/held_out_loss"] - losses[2]) < 1e-5
    assert records[3]["lm/held_out_loss"] < losses[3] - 0.01  # after the last step, not before it
    assert "held-out at first" in outcome.err[0] and all(
        r["seconds/held_out"] > 0 for r in (records[0], records[3])
    )


def test_held_out_documents_are_named_and_not_those_of_training(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lm\.held_out = .*none\.jsonl: no such file"):
        load_corpus(LmTable(held_out=str(tmp_path / "none.jsonl")), None, 131, 4096, 0, False, "held_out")
    config = tmp_path / "lm.toml"
    config.write_text(
        '[model]\nhf = "m"\n[train]\nobjective = "lm"\noutput = "r"\n[lm]\ndata = "d.txt"\nheld_out = "d.txt"\n'
    )
    with pytest.raises(UserError, match=r"lm\.held_out = d\.txt is lm\.data itself"):
        check_train(load_config(config))
