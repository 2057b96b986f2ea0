"""Text at the edges: prompts in, samples and rewards out. Between them there are only token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_lrl.checkpoint.manifest import HF_FOLDER
from megatron_lrl.errors import UserError
from megatron_lrl.models.hf_files import refuse_code
from megatron_lrl.reading import failures_of, read_object
from megatron_lrl.rollout.types import Prompt
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
    """The model's tokenizer and the ids that end a response.

    A directory without tokenizer files works with prompts given as ids; responses then read as ids
    separated by spaces. No code of the directory runs.

    Attributes:
        stop_ids: what the first of generation_config.json, config.json, its text_config and the tokenizer says that
            names any: transformers' order.
        stop_source: which of them that is; None: none of them names any.
    """

    def __init__(self, folder: Path) -> None:
        """Raises `UserError` for a tokenizer that does not load or would run code of the directory, or an
        eos_token_id that is no token id."""
        self.folder = folder
        self.tokenizer: Any = None
        refuse_code(folder)
        if any((folder / name).is_file() for name in _TOKENIZER_FILES):
            from transformers import AutoTokenizer

            for name in (*_TOKENIZER_FILES, *_TOKENIZER_SETTINGS):
                if name.endswith(".json") and (folder / name).exists():
                    read_object(folder / name)
            with failures_of(folder, "the tokenizer does not load"):
                self.tokenizer = AutoTokenizer.from_pretrained(
                    str(folder), local_files_only=True, trust_remote_code=False
                )
        self.stop_source, self.stop_ids = self._stop_ids()

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Text of token ids, without special tokens unless asked for."""
        if self.tokenizer is None:
            return " ".join(map(str, ids))
        return self.tokenizer.decode(list(ids), skip_special_tokens=not special)

    def describe(self, prompts: Iterable[Prompt] = ()) -> str:
        """Which ids end a response, and what of `prompts` is probably not meant; for people, a line each."""
        if self.stop_source is None:
            lines = ["no id ends a response: rollout.max_new_tokens does"]
        else:
            lines = [
                f"a response ends at {' or '.join(map(self._shown, sorted(self.stop_ids)))} ({self.stop_source})"
            ]
        end = None if self.tokenizer is None else self.tokenizer.eos_token_id
        if end is not None and end not in self.stop_ids:
            lines.append(f"the tokenizer's eos_token {self._shown(end)} is not among them")
        ended = next((p for p in prompts if "prompt" in p.record and p.prompt_ids[-1] in self._ends()), None)
        if ended is not None and self._appends_end():
            last = " ".join(map(self._shown, ended.prompt_ids[-3:]))
            lines.append(
                f'warning: the tokenizer ends every "prompt" with an end-of-sequence token (prompt {ended.id!r}: '
                f'... {last}); if that is not meant, give "prompt_ids" or "messages", or change the post_processor of '
                "tokenizer.json"
            )
        return "\n".join(lines)

    def _shown(self, token: int) -> str:
        return str(token) if self.tokenizer is None else f"{token} {self.decode([token], special=True)!r}"

    def _ends(self) -> frozenset[int]:
        end = None if self.tokenizer is None else self.tokenizer.eos_token_id
        return self.stop_ids if end is None else self.stop_ids | {end}

    def _appends_end(self) -> bool:
        """Whether encoding plain text puts an end-of-sequence token behind it."""
        plain, whole = (self.tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
        return len(whole) > len(plain) and whole[-1] in self._ends() and plain[-1:] != whole[-1:]

    def _stop_ids(self) -> tuple[str | None, frozenset[int]]:
        for name in ("generation_config.json", "config.json"):
            path = self.folder / name
            if path.is_file():
                content = read_object(path)
                if ids := _eos_ids(content, str(path)):
                    return name, frozenset(ids)
                text = content.get("text_config")
                if isinstance(text, dict) and (ids := _eos_ids(text, f"{path}: text_config")):
                    return f"text_config of {name}", frozenset(ids)
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            return "the tokenizer", frozenset({self.tokenizer.eos_token_id})
        return None, frozenset()


def _eos_ids(content: dict[str, Any], where: str) -> list[int]:
    """The "eos_token_id" of an object: none, one or several."""
    value = content.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise UserError(f"{where}: eos_token_id = {value!r} must be a token id or a list of them")
    return ids
