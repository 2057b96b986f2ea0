"""The windows of the world tests and the oracles' answers to them, computed once a session."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import hf_oracle, plain_fp64, tiny_models, trajectories
from oracle.objective import Objective

# prompts of 37, 11 and 1 tokens; responses of one to 13 tokens; more groups than dp ranks; nothing divides cp * tp
SHAPE = ((37, (1, 7, 2)), (11, (13, 5)), (1, (4,)))


class Answers:
    """Models, windows and expected numbers, by name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.groups: dict[str, list[trajectories.Group]] = {"mixed": trajectories.window(3, shape=SHAPE)}

    def hf(self, case: str) -> Path:
        """One of `tiny_models.CASES`; "-other" at the end: the same model with other weights; "-offset": with large
        biases of queries and keys."""
        if case.endswith("-offset"):
            return tiny_models.write_offset_case(self.root / "offset", case.removesuffix("-offset"))
        if case.endswith("-other"):
            return tiny_models.write_case(self.root / "other", case.removesuffix("-other"), seed=8)
        return tiny_models.write_case(self.root / "hf", case)

    def add(self, name: str, groups: list[trajectories.Group]) -> str:
        """Names a window."""
        self.groups.setdefault(name, groups)
        return name

    def file(self, window: str) -> Path:
        """A window as a trajectories file."""
        return trajectories.write_jsonl(self.root / f"{window}.jsonl", self.groups[window])

    @cache  # noqa: B019 - one object a session
    def score(self, case: str, window: str, temperature: float = 1.0) -> list[list[list[float]]]:
        """transformers' log-probabilities by group, response and token."""
        return hf_oracle.score(self.hf(case), self.groups[window], temperature)

    @cache  # noqa: B019
    def grad(
        self,
        case: str,
        contract: str,
        window: str = "mixed",
        live: int = 0,
        objective: Objective | None = None,
        reference: str | None = None,
    ) -> dict[str, torch.Tensor]:
        """transformers' gradient; `live`: newest prefix tokens under "truncated"; `reference`: a case."""
        temperature = 1.0 if objective is None else objective.temperature
        at_reference = None if reference is None else self.score(reference, window, temperature)
        question = (self.hf(case), self.groups[window])
        if contract == "truncated":
            return hf_oracle.grad_truncated(*question, live, objective, at_reference)
        answer = {
            "conventional": hf_oracle.grad_conventional,
            "exact": hf_oracle.grad_exact,
            "response_only": hf_oracle.grad_response_only,
        }[contract]
        return answer(*question, objective, at_reference)

    def case(self, case: str, window: str, out: Path, verb: str = "grad", **settings: Any) -> dict[str, Any]:
        """A case for `worlds.ranks`; `contract`, `Z`, `K`, `T` stand for their keys, `__` for the dot in others."""
        short = {"contract": "prefix.contract", "Z": "prefix.chunk_size", "K": "replay.concurrent"}
        short["T"] = "prefix.truncate_tokens"
        values = {"Z": 13, "K": 2, **settings}
        return {
            "verb": verb,
            "hf": str(self.hf(case)),
            "trajectories": str(self.file(window)),
            "out": str(out),
            "settings": [
                "replay.check_poison=true",
                *(f"{short.get(key, key.replace('__', '.'))}={value}" for key, value in values.items()),
            ],
        }

    @cache  # noqa: B019
    def grad_fp64(self, case: str, window: str, detach: bool, live: int = 0) -> dict[str, torch.Tensor]:
        """The plain fp64 gradient."""
        return plain_fp64.grad(self.hf(case), self.groups[window], None, detach, live=live)


@pytest.fixture(scope="session")
def answers(session_dir: Path) -> Answers:
    return Answers(session_dir / "worlds")
