"""Claim: several rewards run at once, a hung, failing or slow one costs at most its time-out and its retries, and what
a reward returns beside its number is kept; plain, asynchronous and batch functions alike.

Why the tests show it: functions that sleep, hang, fail a set number of times or block their event loop are called
through the settings that users write, against the wall clock; counters in the functions say how often they ran and how
many at once.
Not shown: a function that never lets go of Python's lock (threads cannot time it out); rewards on several ranks at
once (tests/cli).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_lrl.config import load_config
from megatron_lrl.errors import UserError
from megatron_lrl.rl.reward_workers import RewardWorkers, part_metrics
from megatron_lrl.rl.rewards import Reward, load_reward
from megatron_lrl.rollout.data import Limits, read_trajectories, write_trajectories
from megatron_lrl.rollout.text import Text
from megatron_lrl.rollout.types import Group, Prompt, Response

PROMPTS = [Prompt(f"g{i}", (1, 2), {"answer": i}) for i in range(3)]
RESPONSES = tuple(Response((5 + i, 2)) for i in range(4))
STOP = 2


class Counted:
    """How often a function was called, and how many calls overlapped at most."""

    def __init__(self) -> None:
        self.calls, self.at_once, self.most = 0, 0, 0
        self.lock = threading.Lock()

    def __enter__(self) -> int:
        with self.lock:
            self.calls += 1
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            return self.calls

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.at_once -= 1


def rewarded(folder: Path, function: Callable[..., Any], *overrides: str, groups: int = 3) -> list[Group]:
    """Groups of four responses, rewarded under the settings of [data]."""
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {STOP}}}')
    settings = load_config(os.devnull, ["model.hf=somewhere", *(f"data.reward_{o}" for o in overrides)]).data
    workers = RewardWorkers(Reward("own:function", function, {}), settings)
    return workers.reward([(prompt, RESPONSES) for prompt in PROMPTS[:groups]], Text(folder))


def values(groups: list[Group]) -> list[list[float | None]]:
    return [[response.reward for response in group.responses] for group in groups]


EXPECTED = [[5.0 + i + 10 * place for i in range(4)] for place in range(3)]


def plain(text: str, record: Mapping[str, Any]) -> float:
    return int(text) + 10 * record["answer"]


async def asynchronous(text: str, record: Mapping[str, Any]) -> float:
    await asyncio.sleep(0.01)
    return plain(text, record)


def batch(texts: list[str], records: list[Mapping[str, Any]]) -> list[float]:
    assert len(texts) == 4 and len({record["answer"] for record in records}) == 1  # one prompt's
    return [plain(text, record) for text, record in zip(texts, records, strict=True)]


def marked(answers: list[str], records: list[Mapping[str, Any]], *, ids: Any, raw_texts: Any) -> Any:
    assert ids == [[5, 2], [6, 2], [7, 2], [8, 2]] and raw_texts == ["5 2", "6 2", "7 2", "8 2"]
    return iter(batch(answers, records))


marked.batch = True  # type: ignore[attr-defined]


async def asynchronous_batch(texts: list[str], records: list[Mapping[str, Any]]) -> list[float]:
    return batch(texts, records)


@pytest.mark.parametrize("function", [plain, asynchronous, batch, marked, asynchronous_batch])
@pytest.mark.parametrize(
    "overrides", [(), ("workers=5",), ("timeout=60",)], ids=["here", "five workers", "time-out"]
)
def test_every_kind_of_function(
    function: Callable[..., Any], overrides: tuple[str, ...], tmp_path: Path
) -> None:
    groups = rewarded(tmp_path, function, *overrides)
    assert values(groups) == EXPECTED
    assert [group.id for group in groups] == ["g0", "g1", "g2"]
    assert [response.ids for response in groups[0].responses] == [response.ids for response in RESPONSES]


@pytest.mark.parametrize("kind", ["plain", "asynchronous"])
def test_eight_workers_are_at_least_five_times_as_fast(
    kind: str, tmp_path: Path, report: Callable[[str, object], None]
) -> None:
    """8 rewards of 0.5 s; one after another they take 4 s."""
    counted = Counted()

    def slow(text: str, record: Mapping[str, Any]) -> float:
        with counted:
            time.sleep(0.5)
        return plain(text, record)

    async def slow_too(text: str, record: Mapping[str, Any]) -> float:
        with counted:
            await asyncio.sleep(0.5)
        return plain(text, record)

    start = time.monotonic()
    groups = rewarded(tmp_path, slow if kind == "plain" else slow_too, "workers=8", groups=2)
    seconds = time.monotonic() - start
    report(f"{kind}: 8 rewards of 0.5 s with 8 workers, seconds", seconds)
    assert values(groups) == EXPECTED[:2]
    assert counted.most == 8
    assert seconds < 4 / 5


def test_workers_are_a_limit(tmp_path: Path) -> None:
    counted = Counted()

    def slow(text: str, record: Mapping[str, Any]) -> float:
        with counted:
            time.sleep(0.02)
        return plain(text, record)

    assert values(rewarded(tmp_path, slow, "workers=3")) == EXPECTED
    assert (counted.calls, counted.most) == (12, 3)


@pytest.mark.parametrize("kind", ["plain", "asynchronous", "blocks its event loop"])
def test_a_hung_reward_stops_the_run_or_counts_as_zero(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release = threading.Event()

    def hangs(text: str, record: Mapping[str, Any]) -> float:
        if text == "6" and record["answer"] == 1:
            release.wait(30)
        return plain(text, record)

    async def hangs_asynchronously(text: str, record: Mapping[str, Any]) -> float:
        if text == "6" and record["answer"] == 1:
            if kind == "asynchronous":
                await asyncio.sleep(30)
            release.wait(30)
        return plain(text, record)

    function = hangs if kind == "plain" else hangs_asynchronously
    try:
        start = time.monotonic()
        with pytest.raises(UserError, match=r"reward own:function on group 'g1' took longer than 0\.3 s"):
            rewarded(tmp_path, function, "timeout=0.3")
        groups = rewarded(tmp_path, function, "timeout=0.3", "retries=1", "errors=zero")
        assert time.monotonic() - start < 10
        behind = [thread for thread in threading.enumerate() if thread.name.startswith("reward")]
        assert behind and all(thread.daemon for thread in behind)  # the interpreter does not wait for them
    finally:
        release.set()
    expected = [list(row) for row in EXPECTED]
    expected[1][1] = 0.0
    assert values(groups) == expected
    assert part_metrics([r for group in groups for r in group.responses], "reward") == {"reward/failed": 1.0}
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "1 of 12 rewards failed and count as 0; one of them: reward own:function on group 'g1' took longer than 0.3 s"
    ]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("error", "named"),
    [(ValueError("busy"), "raised ValueError: busy"), (SystemExit(3), "raised SystemExit: 3")],
)
def test_retries_are_counted(workers: int, error: BaseException, named: str, tmp_path: Path) -> None:
    def fails(times: int) -> tuple[Callable[..., float], Counted]:
        """A function whose first calls fail."""
        counted = Counted()

        def function(text: str, record: Mapping[str, Any]) -> float:
            with counted as call:
                if text == "5" and call <= times:
                    raise error
            return plain(text, record)

        return function, counted

    function, counted = fails(2)
    assert values(rewarded(tmp_path, function, "retries=2", f"workers={workers}", groups=1)) == EXPECTED[:1]
    assert counted.calls in range(5, 7)  # with two workers other responses may come between
    function, counted = fails(99)
    with pytest.raises(UserError, match=f"reward own:function on group 'g0' {named}"):
        rewarded(tmp_path, function, "retries=1", f"workers={workers}", groups=1)
    zero = rewarded(tmp_path, function, "retries=1", f"workers={workers}", "errors=zero", groups=1)
    assert values(zero) == [[0.0, 6.0, 7.0, 8.0]]
    assert zero[0].responses[0].reward_parts == {"failed": 1.0}


def test_parts_are_kept_logged_and_written(tmp_path: Path) -> None:
    def parts(text: str, record: Mapping[str, Any]) -> Any:
        only = {"brief": 1} if text == "5" else {}
        return {"reward": int(text), "format.ok": int(text) - 5, **only}

    groups = rewarded(tmp_path, parts, groups=1)
    assert values(groups) == [[5, 6, 7, 8]]
    assert part_metrics(groups[0].responses, "reward") == {
        "reward/failed": 0.0,
        "reward_parts/brief": 1.0,  # the mean over the responses that have it
        "reward_parts/format.ok": 1.5,
    }
    write_trajectories(tmp_path / "t.jsonl", groups)
    assert list(read_trajectories(tmp_path / "t.jsonl", Limits(16))) == groups


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ({"format": 1.0}, 'there must be "reward"'),
        ({"reward": None}, "returned nothing; a reward must be a finite number"),
        ({"reward": 1, "format": float("nan")}, "returned format = nan"),
        ({"reward": 1, "failed": 1}, "a number named 'failed'"),
        ({"reward": 1, "a/b": 1}, "a number named 'a/b'"),
        ({"reward": 1, 3: 1}, "a number named 3"),
    ],
)
def test_wrong_parts_are_named(returned: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="reward own:function on group 'g0'") as caught:
        rewarded(tmp_path, lambda text, record: returned)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ([1.0] * 3, "returned 3 rewards for 4 responses"),
        (1.0, "one reward a response"),
        ([1, 2, 3, "x"], "'x'"),
    ],
)
def test_a_batch_of_the_wrong_length_is_named(returned: Any, named: str, tmp_path: Path) -> None:
    def wrong(texts: list[str], records: list[Any]) -> Any:
        return returned

    with pytest.raises(UserError, match="reward own:function on group 'g0' returned") as caught:
        rewarded(tmp_path, wrong)
    assert named in str(caught.value)
    assert values(rewarded(tmp_path, wrong, "errors=zero", groups=1)) == [[0.0] * 4]


def test_arguments_of_a_batch_are_checked_when_it_is_loaded(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "batch_reward_for_test.py").write_text(
        "def f(texts, records, bonus): return [bonus] * len(texts)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_reward("batch_reward_for_test:f", {"bonus": 2})("a", PROMPTS[0]) == 2
    with pytest.raises(UserError, match=r"data\.reward_args: .* cannot be called as f\(texts, records\)"):
        load_reward("batch_reward_for_test:f")
