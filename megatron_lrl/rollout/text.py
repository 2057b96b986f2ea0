"""Text at the edges: prompts in, samples and rewards out. Between them there are only token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lrl.checkpoint.manifest import HF_FOLDER
from megatron_lrl.errors import UserError
from megatron_lrl.reading import failures_of, read_object
from megatron_lrl.settings import Config

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_TOKENIZER_SETTINGS = ("special_tokens_map.json", "added_tokens.json")


def hf_folder(config: Config) -> Path:
    """Where the model's Hugging Face files lie: the source directory, or the folder a checkpoint carries."""
    if config.model.checkpoint is not None:
        return Path(config.model.checkpoint) / HF_FOLDER
    assert config.model.hf is not None
    return Path(config.model.hf)


class Text:
    """The model's tokenizer and its end-of-sequence ids.

    A directory without tokenizer files works with prompts given as ids; responses then read as ids
    separated by spaces.
    """

    def __init__(self, folder: Path) -> None:
        """Raises `UserError` for a tokenizer that does not load, or an eos_token_id that is no token id."""
        self.folder = folder
        self.tokenizer: Any = None
        if any((folder / name).is_file() for name in _TOKENIZER_FILES):
            from transformers import AutoTokenizer

            for name in (*_TOKENIZER_FILES, *_TOKENIZER_SETTINGS):
                if name.endswith(".json") and (folder / name).exists():
                    read_object(folder / name)
            with failures_of(folder, "the tokenizer does not load"):
                self.tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        self.stop_ids = self._stop_ids()

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Text of token ids, without special tokens unless asked for."""
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        return self.tokenizer.decode(list(ids), skip_special_tokens=not special)

    def _stop_ids(self) -> frozenset[int]:
        """Every id that ends a response: generation_config.json, config.json and the tokenizer."""
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            path = self.folder / name
            if path.is_file():
                found.update(_eos_ids(path))
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            found.add(self.tokenizer.eos_token_id)
        return frozenset(found)


def _eos_ids(path: Path) -> list[int]:
    """The "eos_token_id" of a JSON file: none, one or several."""
    value = read_object(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise UserError(f"{path}: eos_token_id = {value!r} must be a token id or a list of them")
    return ids
