"""Documents for next-token training, packed into sequences of equal length.

    .txt   .jsonl   Megatron .bin/.idx
         └────┬────────────┘
     documents (token ids) ── order of the epoch ── one stream ── cut every sequence_length tokens
                                                                      └─ parts of documents, each from position 0

A sequence is a function of its number, so a run that resumes needs only its position.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_lrl.errors import UserError
from megatron_lrl.reading import MAX_LINE, failures_of, json_lines, opened, read_text, shown
from megatron_lrl.settings import LmTable

_HEADER = struct.Struct("<9sQBQQ")  # of an index file


class Corpus:
    """Documents as token ids; documents of fewer than two tokens teach nothing and are left out."""

    def __init__(self, documents: Sequence[Any], seed: int, shuffle: bool) -> None:
        """``documents``: sequences of ids, each at least two long. Raises ValueError if there are none."""
        if not len(documents):
            raise ValueError("no documents")
        self.documents, self.seed, self.shuffle = documents, seed, shuffle
        self._lengths = np.array([len(document) for document in documents])

    @property
    def tokens(self) -> int:
        return int(self._lengths.sum())

    def sequences(self, length: int) -> int:
        """Packed sequences of one epoch; what is left of the stream behind the last one is not used."""
        return max(1, self.tokens // length)

    def sequence(self, number: int, length: int) -> list[list[int]]:
        """The parts of documents in packed sequence ``number``; parts of one token are dropped."""
        epoch, place = divmod(number, self.sequences(length))
        order, ends = self._stream(epoch)
        start, stop = place * length, min((place + 1) * length, self.tokens)
        parts = []
        first = int(np.searchsorted(ends, start, side="right"))
        while start < stop:
            document = order[first]
            begin = int(ends[first]) - int(self._lengths[document])
            end = min(int(ends[first]), stop)
            part = [int(token) for token in self.documents[document][start - begin : end - begin]]
            if len(part) > 1:
                parts.append(part)
            start, first = end, first + 1
        return parts

    @lru_cache(maxsize=2)  # noqa: B019  one corpus per run; two epochs at most are under way
    def _stream(self, epoch: int) -> tuple[list[int], np.ndarray]:
        """Order of the documents in an epoch, and where each ends in the stream."""
        order = list(range(len(self.documents)))
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order, np.cumsum(self._lengths[order])


def load_corpus(
    settings: LmTable,
    tokenizer: Any,
    vocab_size: int,
    max_positions: int,
    seed: int,
    shuffle: bool,
    key: Literal["data", "held_out"] = "data",
) -> Corpus:
    """Read the documents of ``lm.data`` or ``lm.held_out``.

    Raises `UserError` naming the file (and line) and what would be valid.
    """
    if settings.sequence_length > max_positions:
        raise UserError(
            f"lm.sequence_length = {settings.sequence_length} exceeds the model's {max_positions} positions"
        )
    path = Path(getattr(settings, key))
    what = f"lm.{key} = {path}"
    if path.with_name(path.name + ".idx").is_file():
        documents: Any = _indexed(path, vocab_size, what)
    elif not path.is_file():
        raise UserError(
            f"{what}: no such file, and no {path}.idx; valid: a .txt or .jsonl file, or the prefix of a "
            "Megatron indexed dataset"
        )
    elif path.suffix == ".txt":
        documents = [_encode(read_text(path, MAX_LINE), tokenizer, f"{path}")]
    elif path.suffix == ".jsonl":
        documents = list(_jsonl(path, settings.text_key, tokenizer, vocab_size))
    else:
        raise UserError(f"{what}: unknown kind of file; valid: .txt, .jsonl, a prefix of .bin and .idx")
    kept = [document for document in documents if len(document) > 1]
    if not kept:
        raise UserError(f"{what} holds no document of at least two tokens")
    return Corpus(kept, seed, shuffle)


def _encode(text: str, tokenizer: Any, where: str) -> list[int]:
    if tokenizer is None:
        raise UserError(
            f"{where}: text needs a tokenizer, and the model's directory has none; give token ids"
        )
    with failures_of(where, "the tokenizer cannot encode it"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    return [*ids, end] if end is not None else ids


def _jsonl(path: Path, key: str, tokenizer: Any, vocab_size: int) -> Iterator[list[int]]:
    for number, record in json_lines(path):
        where = f"{path}:{number}"
        if isinstance(record.get("ids"), list):
            ids = record["ids"]
            if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
                wrong = next(t for t in ids if type(t) is not int or not 0 <= t < vocab_size)
                raise UserError(
                    f'{where}: "ids" must hold token ids, found {shown(wrong)}; valid: 0 to {vocab_size - 1}'
                )
            yield ids
        elif isinstance(record.get(key), str):
            yield _encode(record[key], tokenizer, where)
        else:
            raise UserError(f'{where}: expected an object with "{key}" (text) or "ids" (token ids)')


def _check_index(prefix: Path, what: str) -> None:
    """Raise `UserError` for a header that Megatron-Core's reader would fail on half made, with traces of its own."""
    with (
        opened(prefix.with_name(prefix.name + ".idx")) as file,
        failures_of(what, "not a Megatron indexed dataset"),
    ):
        size = os.fstat(file.fileno()).st_size
        magic, version, kind, sequences, documents = _HEADER.unpack(file.read(_HEADER.size))
        ends = _HEADER.size + 12 * sequences + 8 * documents  # lengths, pointers, document indices
        if magic != b"MMIDIDX\0\0" or version != 1 or not 1 <= kind <= 8 or not documents or ends > size:
            raise ValueError(f"{prefix}.idx: a damaged header")
        file.seek(ends - 8)
        if int.from_bytes(file.read(8), "little") != sequences:
            raise ValueError(f"{prefix}.idx: its documents do not end where its sequences do")
    if not prefix.with_name(prefix.name + ".bin").stat().st_size:
        raise UserError(f"{what}: {prefix}.bin is empty")


def _indexed(prefix: Path, vocab_size: int, what: str) -> list[np.ndarray]:
    """Documents of a Megatron indexed dataset, memory-mapped."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    if not prefix.with_name(prefix.name + ".bin").is_file():
        raise UserError(f"{what}: {prefix}.idx is there, {prefix}.bin is not")
    _check_index(prefix, what)
    with failures_of(what, "not a Megatron indexed dataset"):
        dataset = IndexedDataset(str(prefix))
        bounds = dataset.document_indices
        documents = [
            np.concatenate([dataset[i] for i in range(int(low), int(high))])
            for low, high in pairwise(bounds)
            if high > low
        ]
    for number, document in enumerate(documents):
        if len(document) and not 0 <= int(document.min()) <= int(document.max()) < vocab_size:
            raise UserError(
                f"{what}: document {number} has a token id outside the vocabulary; "
                f"valid: 0 to {vocab_size - 1}"
            )
    return documents
