"""Claim: messages with tools, tool calls, content in parts and template arguments give the ids that transformers' own
chat template gives; nothing a template could have read is lost; text that cannot be encoded is named by file and line.

Why this shows it: transformers' `apply_chat_template` encodes the same messages with the same tools, by a template
that writes tools, calls, a switch and a second, named template; each lost key is one that this template reads.
It does not show: the templates of particular published models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron_lrl.errors import UserError
from megatron_lrl.rollout import chat
from megatron_lrl.rollout.data import Limits, read_prompts

LIMITS = Limits(vocab_size=300)
TEMPLATE = (
    "{{ bos_token }}{% if tools %}TOOLS{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.content is not none %}{{ message.content }}{% else %}NULL{% endif %}"
    "{% for call in message.tool_calls or [] %}CALL{{ call.function | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{% if think is defined and not think %}NO{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "hi"}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}


def byte_tokenizer(template: Any = TEMPLATE, end: bool = False) -> PreTrainedTokenizerFast:
    """Any text, a byte a token; `end`: its post-processor appends end-of-sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({c: i for i, c in enumerate([*alphabet, "<s>", "</s>"])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    single, special = "<s> $A", [("<s>", 256)]
    if end:
        single, special = "<s> $A </s>", [*special, ("</s>", 257)]
    core.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


def encode(tmp_path: Path, record: dict[str, Any], tokenizer: Any = None, **args: Any) -> list[int]:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt_ids": [1]}) + "\n" + json.dumps(record) + "\n")
    return list(
        list(read_prompts(path, LIMITS, tokenizer=tokenizer or byte_tokenizer(), **args))[1].prompt_ids
    )


def by_transformers(messages: list[Any], tokenizer: Any = None, **args: Any) -> list[int]:
    tokenizer = tokenizer or byte_tokenizer()
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **args)
    return list(found)


@pytest.mark.parametrize(
    ("record", "args"),
    [
        ({"messages": [USER]}, {}),
        ({"messages": [USER], "tools": TOOLS, "answer": "x"}, {"tools": TOOLS}),
        ({"messages": [USER], "tools": None}, {}),
        ({"messages": [USER], "chat_template_args": {"think": False}}, {"think": False}),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "tool", "content": "seen", "tool_call_id": "1"},
                ],
                "tools": TOOLS,
            },
            {"tools": TOOLS},
        ),
    ],
)
def test_ids_are_those_of_transformers(tmp_path: Path, record: dict[str, Any], args: dict[str, Any]) -> None:
    assert encode(tmp_path, record) == by_transformers(record["messages"], **args)


def test_the_records_own_arguments_go_before_the_runs(tmp_path: Path) -> None:
    run = {"chat_template_args": {"think": False}}
    assert encode(tmp_path, {"messages": [USER]}, **run) == by_transformers([USER], think=False)
    own = {"messages": [USER], "chat_template_args": {"think": True}}
    assert encode(tmp_path, own, **run) == by_transformers([USER], think=True)


def test_text_parts_are_one_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    record = {"messages": [{"role": "user", "content": parts}]}
    assert encode(tmp_path, record) == by_transformers([USER])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for i in range(99999) %}{% for j in range(500) %}{% endfor %}{% endfor %}", "longer than 0.2 s"),
        ("{% for i in range(9999) %}" + "x" * 9999 + "{% endfor %}", "it made 99980001 characters"),
        ("x" * (1 << 21), "the template has 2097152 characters"),
    ],
    ids=["loops", "long", "large"],
)
def test_a_template_has_limits(
    template: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "_LONGEST_SECONDS", 0.2 if "0.2" in expected else 60.0)
    with pytest.raises(UserError, match=f'the chat template refused "messages": .*{expected}'):
        encode(tmp_path, {"messages": [USER]}, byte_tokenizer(template))


@pytest.mark.parametrize(
    "escape",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ [].__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(escape: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"p\.jsonl:2: the chat template refused"):
        encode(tmp_path, {"messages": [USER]}, byte_tokenizer(escape))


def test_named_templates_are_chosen_as_transformers_does(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(
        {"default": "D", "tool_use": "T{{ tools | length }}", "rag": "R{{ documents }}"}
    )
    assert encode(tmp_path, {"messages": [USER]}, tokenizer) == by_transformers([USER], tokenizer)
    tools = {"messages": [USER], "tools": TOOLS}
    assert encode(tmp_path, tools, tokenizer) == by_transformers([USER], tokenizer, tools=TOOLS)
    args = {"chat_template": "rag", "documents": [{"title": "a"}]}
    rag = {"messages": [USER], "chat_template_args": args}
    assert encode(tmp_path, rag, tokenizer) == by_transformers([USER], tokenizer, **args)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"think": False},
            'the chat template reads "think", but not from there; put it into "chat_template_args"',
        ),
        ({"tool": TOOLS}, 'unknown key "tool"; did you mean "tools"?'),
        (
            {"chat_template_kwargs": {}},
            'unknown key "chat_template_kwargs"; did you mean "chat_template_args"?',
        ),
        ({"chat_template_args": [1]}, '"chat_template_args" must be an object'),
        ({"chat_template_args": {"tokenize": True}}, "the chat template refused"),
        ({"tools": {"name": "look"}}, '"tools" must be a list of objects'),
        ({"messages": [{"role": "assistant", "content": None}]}, 'null beside "tool_calls"'),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            '"messages"[0]: "content"[0] must be',
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": {}}]},
            '"messages"[0]: "tool_calls"',
        ),
        ({"messages": [{"role": "user", "content": "abc \ud83d"}]}, "lone surrogate"),
        ({"tools": [{"name": "\udc00"}]}, "lone surrogate"),
    ],
)
def test_what_would_be_lost_is_named(tmp_path: Path, fields: dict[str, Any], expected: str) -> None:
    record = {"messages": [USER], **fields}
    with pytest.raises(UserError) as caught:
        encode(tmp_path, record)
    assert str(caught.value).startswith(f"{tmp_path / 'p.jsonl'}:2: ") and expected in str(caught.value)


def test_tools_that_the_template_does_not_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'p\.jsonl:2: "tools" would be lost'):
        encode(tmp_path, {"messages": [USER], "tools": TOOLS}, byte_tokenizer("{{ messages[0].content }}"))


def test_half_a_surrogate_pair_in_plain_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"p\.jsonl:2: .*lone surrogate"):
        encode(tmp_path, {"prompt": "abc \ud83d"})
