"""Claim: next-token training sees each document alone, from position 0; its gradient is that of the mean cross entropy.

Why the tests show it: the gradient of one update is compared with a plain float64 transformer that runs every packed
part by itself; with LastKV with the chunk-parallel reference, part by part, so a clock or a key that leaked from one
document into the next would show. Packing is checked on streams whose tokens name their place.
Not shown: that uptraining helps a real model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lifetimes.tiny import tiny_run
from oracle.compare import compare_tensors
from oracle.lastkv_reference import ChunkParallel
from oracle.plain_fp64 import PlainModel

from megatron_lrl.checkpoint.hf_export import gather_hf_tensors, parameter_gradient
from megatron_lrl.errors import UserError
from megatron_lrl.rl.lm import LmTrainer
from megatron_lrl.rl.lm_data import Corpus, load_corpus
from megatron_lrl.rl.stopwatch import Stopwatch
from megatron_lrl.settings import LmTable

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
    with tiny_run(tmp_path, *overrides) as run, run.update_window() as window:
        loss, tokens, finite = LmTrainer(run, corpus)._attempt(window, 0, Stopwatch())
        ours = dict(gather_hf_tensors(run.model, run.arch, run.runtime, parameter_gradient))
        folder = Path(run.config.model.hf or "")
        parts = [part for number in range(2) for part in corpus.sequence(number, 64)]
    assert finite and tokens == sum(len(part) - 1 for part in parts)
    expected_loss, expected = _expected(folder, parts, tokens, chunk, ours)
    comparison = compare_tensors(ours, expected)
    report(f"lm gradient, {'lastkv' if chunk else 'full'}, {contract}", str(comparison))
    assert abs(loss - expected_loss) < 1e-10
    comparison.require(1e-10, 1e-9)


def _expected(
    folder: Path, parts: list[list[int]], tokens: int, chunk: int | None, ours: dict[str, torch.Tensor]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean cross entropy and its gradient, every part by itself, in float64."""
    model: PlainModel
    if chunk:
        # The program rounds alpha's logit to the dtype of the source's weights when it converts.
        gates = {
            name: torch.logit(torch.tensor(0.3, dtype=torch.float64))
            .float()
            .double()
            .expand(value.shape)
            .clone()
            for name, value in ours.items()
            if name.endswith("lastkv_gate")
        }
        model = ChunkParallel(folder, gates, chunk)
    else:
        model = PlainModel(folder)
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
