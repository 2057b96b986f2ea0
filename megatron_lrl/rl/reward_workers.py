"""Rewards of many responses: several calls at once, each with a time-out, retries, and a rule for what failed.

    sampled responses ──> Call ──> attempt in a daemon thread ──> Score ──> Group
                                     │ awaitable: on one event loop (asynchronous functions share its clients)
                                     └ failed: again, up to data.reward_retries times; then stop, or 0

A thread that does not come back by its time-out is left behind: it is a daemon, so it keeps neither the update nor
the process waiting, and its late answer is thrown away. A function that never lets go of Python's lock cannot be
timed out.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from threading import Event, Lock, Thread, current_thread, main_thread
from typing import Any

from megatron_lrl.errors import UserError
from megatron_lrl.rl.foreign import contained, stays
from megatron_lrl.rl.rewards import FAILED, Call, Reward, Score
from megatron_lrl.rollout.text import Text
from megatron_lrl.rollout.types import Group, Prompt, Response
from megatron_lrl.settings_data import DataTable

_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
"""Seconds before the first retry; every further one waits twice as long, up to the longest."""

_PING = 1.0
"""Seconds within which an event loop answers, unless a function blocks it."""


@dataclass(eq=False)
class _Attempt:
    """A call of the function on its way."""

    place: int
    call: Call
    tries: int = 0  # that failed before
    deadline: float = float("inf")  # on time.monotonic's clock
    future: Future[Any] | None = None  # of an asynchronous function

    @property
    def pause(self) -> float:
        return min(_PAUSE * 2 ** (self.tries - 1), _LONGEST_PAUSE) if self.tries else 0.0


class _Loop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        Thread(target=self._run, daemon=True, name="reward event loop").start()

    def _run(self) -> None:
        with contained():
            self._loop.run_forever()

    def start(self, awaitable: Awaitable[Any]) -> Future[Any]:
        async def wait() -> Any:
            try:
                return await awaitable
            except (SystemExit, KeyboardInterrupt) as error:  # it would end the loop
                return error

        return asyncio.run_coroutine_threadsafe(wait(), self._loop)

    def answers(self) -> bool:
        """Whether it still runs; False if a function blocks it."""
        pinged = Event()
        self._loop.call_soon_threadsafe(pinged.set)
        return pinged.wait(_PING)


_loop: list[
    _Loop
] = []  # one a process: clients of asynchronous functions belong to the loop that opened them


_opening = Lock()


def _event_loop() -> _Loop:
    with _opening:
        if not _loop:
            _loop.append(_Loop())
        return _loop[0]


class RewardWorkers:
    """Calls a reward function as the settings of [data] say."""

    def __init__(self, reward: Reward, settings: DataTable) -> None:
        self.function, self.settings = reward, settings

    def reward(self, sampled: Sequence[tuple[Prompt, Sequence[Response]]], text: Text) -> list[Group]:
        """Groups of the responses with rewards and their parts.

        The function reads the text without the token that ended the response; ids and raw text are whole. A batch
        function gets the responses of one prompt, so that the layout of the ranks cannot change what it sees.
        Raises UserError naming the function and the group if a reward failed and data.reward_errors is "stop".
        """
        calls: list[Call] = []
        for prompt, responses in sampled:
            judged = [_judged(response, text) for response in responses]
            for part in [judged] if self.function.batch else [[one] for one in judged]:
                texts, ids, raw_texts = zip(*part, strict=True)
                calls.append(Call(prompt, texts, ids, raw_texts))
        scores = iter(score for part in self.scores(calls) for score in part)
        return [
            Group(
                prompt.id,
                prompt.prompt_ids,
                tuple(
                    replace(response, reward=score.reward, reward_parts=score.parts)
                    for response in responses
                    for score in [next(scores)]
                ),
            )
            for prompt, responses in sampled
        ]

    def scores(self, calls: Sequence[Call]) -> list[list[Score]]:
        """The scores of every call, in order; see `reward` for what is raised."""
        inline = self.settings.reward_workers == 1 and not self.settings.reward_timeout
        with stays():
            outcomes = [self._here(call) for call in calls] if inline else self._in_threads(calls)
        failures = [outcome for outcome in outcomes if isinstance(outcome, UserError)]
        if failures:
            print(
                f"{len(failures)} of {len(calls)} rewards failed and count as 0; one of them: {failures[0]}",
                flush=True,
            )
        return [
            [Score(0.0, {FAILED: 1.0}) for _ in call.texts] if isinstance(outcome, UserError) else outcome
            for call, outcome in zip(calls, outcomes, strict=True)
        ]

    def _here(self, call: Call) -> list[Score] | UserError:
        """One call in this thread."""
        attempt: _Attempt | None = _Attempt(0, call)
        while attempt is not None:
            outcome = self._call(attempt)
            attempt = self._again(attempt, outcome)
        return outcome

    def _in_threads(self, calls: Sequence[Call]) -> list[list[Score] | UserError]:
        """All calls, data.reward_workers of them at once."""
        timeout = self.settings.reward_timeout or float("inf")
        waiting = deque(_Attempt(place, call) for place, call in enumerate(calls))
        running: set[_Attempt] = set()
        finished: queue.SimpleQueue[tuple[_Attempt, list[Score] | UserError]] = queue.SimpleQueue()
        outcomes: dict[int, list[Score] | UserError] = {}

        def settle(attempt: _Attempt, outcome: list[Score] | UserError) -> None:
            running.discard(attempt)
            further = self._again(attempt, outcome)
            if further is not None:
                waiting.append(further)
            else:
                outcomes[attempt.place] = outcome

        while waiting or running:
            while waiting and len(running) < self.settings.reward_workers:
                attempt = waiting.popleft()
                attempt.deadline = time.monotonic() + attempt.pause + timeout
                running.add(attempt)
                Thread(
                    target=lambda one=attempt: finished.put((one, self._call(one))),
                    daemon=True,
                    name=f"reward of {attempt.call.prompt.id}",
                ).start()
            left = min(attempt.deadline for attempt in running) - time.monotonic()
            try:
                attempt, outcome = finished.get(timeout=None if left == float("inf") else max(0.0, left))
            except queue.Empty:
                for late in [attempt for attempt in running if attempt.deadline <= time.monotonic()]:
                    _abandon(late)
                    settle(late, self.function.failure(late.call, f"took longer than {timeout:g} s"))
                continue
            if attempt in running:  # else it comes too late
                settle(attempt, outcome)
        return [outcomes[place] for place in range(len(calls))]

    def _call(self, attempt: _Attempt) -> list[Score] | UserError:
        """One attempt, after its pause."""
        time.sleep(attempt.pause)
        try:
            with contained():
                value = self.function.start(attempt.call)
            if inspect.isawaitable(value):
                attempt.future = _event_loop().start(value)
                value = attempt.future.result()
                if isinstance(value, BaseException):
                    raise value
            return self.function.scores(attempt.call, value)
        except BaseException as error:  # the user's own function may raise anything
            if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():
                raise
            return self.function.failure(attempt.call, error)

    def _again(self, attempt: _Attempt, outcome: list[Score] | UserError) -> _Attempt | None:
        """The attempt after this one, if it failed and there is one; raises where a failure stops the run."""
        if not isinstance(outcome, UserError):
            return None
        if attempt.tries < self.settings.reward_retries:
            return _Attempt(attempt.place, attempt.call, attempt.tries + 1)
        if self.settings.reward_errors == "stop":
            raise outcome
        return None


def part_metrics(responses: Sequence[Response], name: str) -> dict[str, float]:
    """``name/failed``, how many rewards failed, and the mean of every part over the responses that have it."""
    parts: dict[str, list[float]] = {}
    for response in responses:
        for part, value in response.reward_parts.items():
            parts.setdefault(part, []).append(value)
    failed = sum(parts.pop(FAILED, []))
    means = {f"{name}_parts/{part}": sum(parts[part]) / len(parts[part]) for part in sorted(parts)}
    return {f"{name}/failed": failed} | means


def _judged(response: Response, text: Text) -> tuple[str, tuple[int, ...], str]:
    ids = response.ids
    spoken = ids[:-1] if ids[-1] in text.stop_ids else ids
    return text.decode(spoken), ids, text.decode(ids, special=True)


def _abandon(attempt: _Attempt) -> None:
    """Cancel what an asynchronous function still does; a blocked event loop is replaced."""
    if attempt.future is not None:
        attempt.future.cancel()
        if not _event_loop().answers():
            _loop.clear()
