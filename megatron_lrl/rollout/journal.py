"""The journal: recorded rollouts of each update, on disk before their first replay.

    output/journal/update-000007.jsonl      update number 7, counted from 0
        {"journal": 1, "update": 7, "config": {...}, "entropy": 1.9, "groups": 2}
        {"id": ..., "prompt_ids": [...], "responses": [...]}        one line a group, as trajectories
        {"sha256": "..."}                                           of all bytes before this line

A run that resumes from the checkpoint after k updates replays the recorded rollouts of updates k, k+1, ... instead of
sampling them again. Files are written whole: to a temporary name, onto the disk, then renamed. A file that is damaged
all the same is named in a line, and its update is sampled again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lrl.config import differing_settings
from megatron_lrl.errors import UserError
from megatron_lrl.experts.record import Routing
from megatron_lrl.reading import MAX_LINE, parse_json, read_bytes
from megatron_lrl.rollout.data import group_record
from megatron_lrl.rollout.types import Group, Prompt, Response
from megatron_lrl.settings import Config

JOURNAL = "journal"
_FORMAT = 1
_PER_TOKEN = ("logprobs", "advantage", "mask")
_NAME = re.compile(r"update-(\d{6,})\.jsonl")


@dataclass(frozen=True)
class Recorded:
    """Rollouts of an update: every group of the window in order, and the entropy they were sampled at, if known."""

    groups: tuple[Group, ...]
    entropy: float | None


class Journal:
    """Recorded rollouts of a run's output folder. One rank reads and writes."""

    def __init__(self, output: Path, config: Config, inputs: Mapping[str, str] | None = None) -> None:
        """``inputs``: fingerprints of what the run reads; rollouts recorded with others are sampled again."""
        self.folder, self.config, self.inputs = output / JOURNAL, config, dict(inputs or {})

    def path(self, update: int) -> Path:
        return self.folder / f"update-{update:06d}.jsonl"

    def record(self, update: int, recorded: Recorded) -> None:
        """Write an update's rollouts; on the disk when this returns. Raises `UserError` if they cannot be written."""
        header = {
            "journal": _FORMAT,
            "update": update,
            "config": self.config.model_dump(mode="json"),
            "inputs": self.inputs,
            "entropy": recorded.entropy,
            "groups": len(recorded.groups),
        }
        lines = [json.dumps(record) for record in (header, *map(group_record, recorded.groups))]
        body = "".join(f"{line}\n" for line in lines).encode()
        end = json.dumps({"sha256": hashlib.sha256(body).hexdigest()}).encode() + b"\n"
        path = self.path(update)
        temporary = path.with_name(f".{path.name}.incomplete")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(body + end)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_folder(self.folder)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)  # on a full disk, every byte of it is missing elsewhere
            raise UserError(f"{path}: the rollouts cannot be recorded: {error.strerror or error}") from error

    def recall(self, update: int, prompts: Sequence[Prompt]) -> Recorded | None:
        """The recorded rollouts of an update of these prompts; None, and a line, if they cannot be trusted."""
        path = self.path(update)
        if not path.exists():
            if path.with_name(f".{path.name}.incomplete").exists():
                print(
                    f"skipped {path}: writing it was interrupted; update {update + 1} is sampled again",
                    flush=True,
                )
            return None
        try:
            recorded = self._read(path, update)
            if [(g.id, g.prompt_ids) for g in recorded.groups] != [(p.id, p.prompt_ids) for p in prompts]:
                raise ValueError("recorded for other prompts")
            print(f"update {update + 1}: replays the rollouts recorded in {path}", flush=True)
            return recorded
        except (UserError, ValueError, LookupError, TypeError, AttributeError) as error:
            reason = error if isinstance(error, (UserError, ValueError)) else "damaged"
            print(f"skipped {path}: {reason}; update {update + 1} is sampled again", flush=True)
            return None

    def trim(self, before: int) -> None:
        """Delete rollouts of earlier updates: no checkpoint that is still there would replay them."""
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match is not None and int(match[1]) < before:
                path.unlink(missing_ok=True)

    def _read(self, path: Path, update: int) -> Recorded:
        content = read_bytes(path, MAX_LINE)
        body, _, end = content.removesuffix(b"\n").rpartition(b"\n")
        body += b"\n"
        if (
            not content.endswith(b"\n")
            or parse_json(end, f"{path}: its end")["sha256"] != hashlib.sha256(body).hexdigest()
        ):
            raise ValueError("damaged: its checksum does not match")
        header, *records = (
            parse_json(line, f"{path}:{number}")
            for number, line in enumerate(body.split(b"\n")[:-1], start=1)
        )
        if (header["journal"], header["update"], header["groups"]) != (_FORMAT, update, len(records)):
            raise ValueError("not this update's rollouts")
        differing = differing_settings(header["config"], self.config)
        # The length of the run shapes the learning rate's decay, and with it the policy that sampled.
        if header["config"]["train"]["updates"] != self.config.train.updates:
            differing.append("train.updates")
        if (before := header.get("inputs")) and before != self.inputs:
            names = [
                name for name in sorted(before | self.inputs) if before.get(name) != self.inputs.get(name)
            ]
            raise ValueError(f"recorded with other content of {', '.join(names[:4])}")
        if differing:
            raise ValueError(f"recorded under other settings ({', '.join(differing)})")
        return Recorded(tuple(_group(record) for record in records), header["entropy"])


def _group(record: dict[str, Any]) -> Group:
    responses = tuple(_response(item) for item in record["responses"])
    return Group(record["id"], tuple(record["prompt_ids"]), responses, record.get("version", 0))


def _response(item: dict[str, Any]) -> Response:
    lists = {name: tuple(x) if isinstance(x := item.get(name), list) else x for name in _PER_TOKEN}
    routing = None if item.get("routing") is None else Routing.from_json(item["routing"])
    return Response(
        tuple(item["ids"]),
        item.get("reward"),
        **lists,
        routing=routing,
        reward_parts=item.get("reward_parts", {}),
    )


def _sync_folder(folder: Path) -> None:
    """Put a rename onto the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
