"""Claim: what is written is read back; every kind of bad line is refused with its file, line and field;
prompts come in an order that depends on the seed and the position alone.

Why this shows it: generated groups make the round trip; each bad input of the list is the second line of a
file whose first is good, and the message is searched for ":2" and the field; a real (tiny, local) tokenizer
with a chat template encodes text and messages.
It does not show: behaviour with a particular model's tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron_lrl.errors import UserError
from megatron_lrl.rollout.data import (
    Limits,
    group_record,
    prompts_at,
    read_prompts,
    read_trajectories,
    write_jsonl,
    write_trajectories,
)
from megatron_lrl.rollout.types import Group, Prompt, Response

LIMITS = Limits(vocab_size=100, max_positions=12)
GOOD = {"id": "g0", "prompt_ids": [1, 2], "responses": [{"ids": [3]}]}

floats = st.floats(allow_nan=False, allow_infinity=False)
ids = st.lists(st.integers(0, 99), min_size=1, max_size=6).map(tuple)


@st.composite
def responses(draw: st.DrawFn) -> Response:
    tokens = draw(ids)

    def of_each(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.lists(values, min_size=len(tokens), max_size=len(tokens)).map(tuple)

    mask = draw(
        st.none() | of_each(st.integers(0, 1)).filter(lambda m: 0 < sum(m) < len(m))
        if len(tokens) > 1
        else st.none()
    )
    logprobs, advantage = (
        draw(st.none() | of_each(st.floats(-50, 0))),
        draw(st.none() | floats | of_each(floats)),
    )
    if mask is not None:  # what stands where the mask is 0 reads as 0
        logprobs = logprobs and tuple(x * one for x, one in zip(logprobs, mask, strict=True))
        if isinstance(advantage, tuple):
            advantage = tuple(x if one else 0.0 for x, one in zip(advantage, mask, strict=True))
    return Response(tokens, draw(st.none() | floats), logprobs, advantage, mask=mask)


groups = st.builds(
    Group,
    id=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    prompt_ids=ids,
    responses=st.lists(responses(), min_size=1, max_size=4).map(tuple),
)


@pytest.fixture
def write(tmp_path: Path):
    def _write(*lines: Any) -> Path:
        path = tmp_path / "lines.jsonl"
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        path.write_text(text + "\n", encoding="utf-8")
        return path

    return _write


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<s>", "<unk>", "<sys>", "<user>", "<bot>", "What", "is", "it", "?", "Be", "brief"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", unk_token="<unk>")
    made.chat_template = (
        "{{ bos_token }} {% for m in messages %}"
        "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "{{ {'system': '<sys>', 'user': '<user>'}[m.role] }} {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}<bot>{% endif %}{% if brief %} brief{% endif %}"
    )
    return made


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(written=st.lists(groups, min_size=1, max_size=4, unique_by=lambda group: group.id))
def test_round_trip(tmp_path: Path, written: list[Group]) -> None:
    path = tmp_path / "t.jsonl"
    assert write_trajectories(path, written) == len(written)
    assert list(read_trajectories(path, Limits(100))) == written


def test_the_documented_format(write) -> None:
    line = (
        '{"id": "g0", "prompt_ids": [1, 2], "responses": '
        '[{"ids": [3, 4], "reward": 1.0, "logprobs": [-0.5, -1], "advantage": 0.5}, {"ids": [5]}], "note": 1}'
    )
    path = write("\ufeff" + line, "", "  ", {**GOOD, "id": 7})
    first, second = read_trajectories(path, LIMITS)
    assert first == Group("g0", (1, 2), (Response((3, 4), 1.0, (-0.5, -1.0), 0.5), Response((5,))))
    assert second.id == "7"
    masked = {"ids": [3, 4, 5], "logprobs": [-1, None, "?"], "advantage": [0.5, None, 2], "mask": [1, 0, 0]}
    (third,) = read_trajectories(write({**GOOD, "responses": [masked]}), LIMITS)
    assert third.responses == (Response((3, 4, 5), None, (-1.0, 0.0, 0.0), (0.5, 0.0, 0.0), mask=(1, 0, 0)),)
    assert group_record(second) == {**GOOD, "id": "7"}


def test_reading_streams(write) -> None:
    stream = read_trajectories(write(GOOD, "{"), LIMITS)
    assert next(stream).id == "g0"
    with pytest.raises(UserError, match=":2: not valid JSON"):
        next(stream)


def changed(**fields: Any) -> dict[str, Any]:
    return {**GOOD, "id": "g1", **fields}


def answered(**fields: Any) -> dict[str, Any]:
    return changed(responses=[{"ids": [3]}, {"ids": [4, 5], **fields}])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "not valid JSON"),
        ('{"id": "g1"', "not valid JSON"),
        ("[" * 100_000, "nested more than 100 deep"),
        ("[1]", "must be a JSON object"),
        (GOOD, "\"id\" 'g0' was already used in line 1"),
        (changed(id=None), '"id" must be a non-empty string'),
        (changed(id=""), '"id" must be a non-empty string'),
        (changed(id=True), '"id" must be a non-empty string'),
        (changed(prompt_ids=[]), '"prompt_ids" is empty'),
        (changed(prompt_ids=None), '"prompt_ids" must be a list'),
        (changed(prompt_ids="1 2"), '"prompt_ids" must be a list'),
        (changed(prompt_ids=[1, 100]), '"prompt_ids"[1] = 100 is outside the vocabulary; valid: 0 to 99'),
        (changed(prompt_ids=[-1]), '"prompt_ids"[0] = -1 is outside'),
        (changed(prompt_ids=[1.0]), '"prompt_ids"[0] must be an integer'),
        (changed(prompt_ids=[True]), '"prompt_ids"[0] must be an integer'),
        (changed(prompt_ids=[1] * 12), "12 prompt tokens + 1 tokens of the response exceed the model's 12"),
        (changed(responses=[]), '"responses" must be a non-empty list'),
        (changed(responses=[3]), "responses[0] must be an object"),
        ({"id": "g1", "prompt_ids": [1], "response": []}, 'unknown key "response"; did you mean "responses"'),
        (answered(ids=[]), 'responses[1]: "ids" is empty'),
        (answered(ids=[4, 100]), 'responses[1]: "ids"[1] = 100 is outside the vocabulary'),
        (answered(reward=float("nan")), 'responses[1]: "reward" must be finite, found nan'),
        (answered(reward=float("inf")), 'responses[1]: "reward" must be finite, found inf'),
        (answered(reward=10**400), "an integer of 401 digits"),
        (answered(reward="1"), 'responses[1]: "reward" must be a number'),
        (answered(reward=True), 'responses[1]: "reward" must be a number'),
        (answered(advantage=float("nan")), 'responses[1]: "advantage" must be finite'),
        (answered(advantage=[1.0]), '"advantage" must hold one value per token (2), found 1 values'),
        (answered(advantage=[1.0, None]), '"advantage"[1] must be a number'),
        (answered(mask=[1]), '"mask" must hold one value per token (2), found 1 values'),
        (answered(mask=1), '"mask" must hold one value per token (2), found 1'),
        (answered(mask=[1, 2]), '"mask"[1] must be 0 or 1, found 2'),
        (answered(mask=[1.0, 0]), '"mask"[0] must be 0 or 1, found 1.0'),
        (answered(mask=[True, 0]), '"mask"[0] must be 0 or 1, found True'),
        (answered(mask=[0, 0]), '"mask" is 0 for every token'),
        (answered(mask=[1, 0], logprobs=[None, -1.0]), '"logprobs"[0] must be a number'),
        (answered(masks=[1, 0]), 'unknown key "masks"; did you mean "mask"?'),
        (answered(logprobs=[-1.0]), '"logprobs" must hold one value per token (2), found 1 values'),
        (answered(logprobs=-1.0), '"logprobs" must hold one value per token (2), found -1.0'),
        (answered(logprobs=[-1.0, None]), '"logprobs"[1] must be a number'),
        (answered(logprobs=[-1.0, float("nan")]), '"logprobs"[1] must be finite'),
        (answered(logprobs=[-1.0, float("-inf")]), '"logprobs"[1] must be finite'),
        (answered(logprobs=[-1.0, 0.5]), '"logprobs" must be at most 0'),
        (answered(logprob=[-1.0, -1.0]), 'unknown key "logprob"; did you mean "logprobs"?'),
    ],
)
def test_bad_trajectories(write, line: Any, expected: str) -> None:
    path = write(GOOD, line)
    with pytest.raises(UserError) as caught:
        list(read_trajectories(path, LIMITS))
    assert str(caught.value).startswith(f"{path}:2: ") and expected in str(caught.value)


def test_the_longest_sequence_that_fits(write) -> None:
    path = write(changed(prompt_ids=[1] * 11))
    assert len(list(read_trajectories(path, LIMITS))) == 1


def test_files_that_cannot_be_used(write, tmp_path: Path) -> None:
    for read in (read_trajectories, read_prompts):
        with pytest.raises(UserError, match="holds no"):
            list(read(write(""), LIMITS))
        with pytest.raises(UserError, match=r"missing\.jsonl: cannot be read"):
            list(read(tmp_path / "missing.jsonl", LIMITS))
    path = write(GOOD)
    path.write_bytes(b'{"id": "\xff"}\n')
    with pytest.raises(UserError, match=":1: not UTF-8 text"):
        list(read_trajectories(path, LIMITS))


def test_prompts(write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(
        {"prompt_ids": [5, 6], "answer": "x"},
        {"id": "text", "prompt": "What is it ?"},
        {"id": "chat", "messages": [{"role": "user", "content": "What ?"}]},
        {"id": "own", "messages": [{"role": "system", "content": "is"}, {"role": "user", "content": "it"}]},
    )
    first, text, chat, own = read_prompts(
        path, LIMITS, tokenizer=tokenizer, system_prompt="Be brief", chat_template_args={"brief": True}
    )
    assert first == Prompt("line-1", (5, 6), {"prompt_ids": [5, 6], "answer": "x"})
    assert (text.id, text.prompt_ids) == ("text", (0, 5, 6, 7, 8))
    # One <s>, from the template; <bot> opens the answer; the argument `brief` reached the template.
    assert chat.prompt_ids == (0, 2, 9, 10, 3, 5, 8, 4, 10)
    assert own.prompt_ids == (0, 2, 6, 3, 7, 4, 10)
    plain = list(read_prompts(path, LIMITS, tokenizer=tokenizer))[2]
    assert plain.prompt_ids == (0, 3, 5, 8, 4)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("nonsense", "not valid JSON"),
        ({"answer": "x"}, "give exactly one of prompt_ids, prompt, messages; found none"),
        ({"prompt": "What", "prompt_ids": [1]}, "give exactly one of"),
        ({"id": "line-1", "prompt_ids": [1]}, "'line-1' was already used in line 1"),
        ({"prompt_ids": []}, '"prompt_ids" is empty'),
        ({"prompt_ids": [100]}, "outside the vocabulary"),
        ({"prompt": 3}, '"prompt" must be a string'),
        ({"messages": []}, '"messages" must be a non-empty list'),
        ({"messages": "hi"}, '"messages" must be a non-empty list'),
        ({"messages": [{"role": "user"}]}, '"messages"[0] must have the strings "role" and "content"'),
        ({"messages": [{"role": "tool", "content": "x"}]}, "the chat template refused"),
        ({"prompt_ids": [1] * 10}, "10 prompt tokens + 3 tokens of rollout.max_new_tokens exceed"),
    ],
)
def test_bad_prompts(write, tokenizer: PreTrainedTokenizerFast, line: Any, expected: str) -> None:
    path = write({"prompt_ids": [1]}, line)
    with pytest.raises(UserError) as caught:
        list(read_prompts(path, LIMITS, tokenizer=tokenizer, max_new_tokens=3))
    assert str(caught.value).startswith(f"{path}:2: ") and expected in str(caught.value)


def test_text_needs_a_tokenizer_and_messages_a_template(write) -> None:
    with pytest.raises(UserError, match='"prompt" needs a tokenizer'):
        list(read_prompts(write({"prompt": "What"}), LIMITS))
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    path = write({"messages": [{"role": "user", "content": "a"}]})
    with pytest.raises(UserError, match="need a chat template"):
        list(read_prompts(path, LIMITS, tokenizer=bare))
    with pytest.raises(UserError, match='"prompt" is empty'):
        list(read_prompts(write({"prompt": ""}), LIMITS, tokenizer=bare))


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_jsonl(path, [{"a": 1}])

    def broken():
        yield {"a": 2}
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        write_jsonl(path, broken())
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_jsonl(path, [{"a": float("nan")}])
    assert [file.name for file in tmp_path.iterdir()] == ["t.jsonl"]
    assert path.read_text() == '{"a": 1}\n'
    for nowhere in (tmp_path / "missing" / "t.jsonl", path / "t.jsonl"):
        with pytest.raises(UserError, match="cannot be written"):
            write_jsonl(nowhere, [])


def test_order_of_prompts() -> None:
    prompts = [Prompt(f"p{i}", (i,)) for i in range(7)]

    def names(position: int, count: int, shuffle: bool, seed: int = 0) -> list[str]:
        return [p.id for p in prompts_at(prompts, position, count, shuffle=shuffle, seed=seed)]

    assert names(5, 4, shuffle=False) == ["p5", "p6", "p0", "p1"]
    stream = names(0, 21, shuffle=True)
    epochs = [stream[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(epoch) == [p.id for p in prompts] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert stream != names(0, 21, shuffle=True, seed=1)
    # Resuming at a position continues the same stream.
    assert names(0, 5, shuffle=True) + names(5, 16, shuffle=True) == stream
    with pytest.raises(ValueError, match="no prompts"):
        prompts_at([], 0, 1, shuffle=False, seed=0)
