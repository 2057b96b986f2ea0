"""Settings of what is read: the tables [data], [eval] and [lm]."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from megatron_lrl.table import MOST_AT_ONCE, Table, key


class DataTable(Table):
    """Prompts and their reward."""

    prompts: str | None = key(
        None, 'JSONL file; a line has "prompt_ids", "prompt" or "messages"', min_length=1
    )
    reward: str = key(
        "megatron_lrl.rl.rewards:exact_match",
        '"module:function", called as f(text, record) -> float',
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
    )
    reward_args: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments for the reward function"
    )
    reward_workers: int = key(
        1,
        "rewards computed at once on each dp replica, in threads (asynchronous functions: on one event loop)",
        ge=1,
    )
    reward_timeout: float = key(
        0.0,
        "seconds for one call of the reward function, after which it counts as failed and is left behind; 0 = none. "
        "With it, or with several workers, the function runs outside the main thread (no signal.alarm)",
        ge=0,
    )
    reward_retries: int = key(
        0,
        "further calls after one that failed (an exception, a wrong value, the time-out), with pauses",
        ge=0,
    )
    reward_errors: Literal["stop", "zero"] = key(
        "stop",
        "when all calls for a response failed: stop the run, or count its reward as 0 (reward/failed counts them)",
    )
    shuffle: bool = key(True, "new order of the prompts in every epoch, from train.seed; false: file order")
    system_prompt: str | None = key(None, 'system message put before "messages" that have none')
    chat_template_args: dict[str, Any] = Field(
        default_factory=dict,
        description="variables for the tokenizer's chat template, e.g. enable_thinking = false",
    )


class EvalTable(Table):
    """Held-out prompts, sampled and rewarded as those of data.prompts are, and never trained on."""

    prompts: str | None = key(
        None,
        "JSONL file of held-out prompts: mean reward and pass@k (the chance that one of k responses has reward 1) "
        "before the first update, every eval.every updates and after the last; unset = no evaluation",
        min_length=1,
    )
    every: int = key(10, "updates between evaluations; 0 = before the first and after the last only", ge=0)
    samples: int = key(
        4,
        f"n, responses per held-out prompt, at most {MOST_AT_ONCE}; pass@k for k = 1, 2, 4, ... and n",
        ge=1,
        le=MOST_AT_ONCE,
    )
    temperature: float = key(1.0, "of evaluation's sampling; near 0 it takes the likeliest token", gt=0)


class LmTable(Table):
    """Next-token training, read when train.objective = "lm"."""

    data: str | None = key(
        None,
        "documents: a .txt file (one document), a .jsonl file (one a line), or the prefix of a Megatron indexed "
        "dataset (PREFIX.bin and PREFIX.idx, token ids of this model)",
        min_length=1,
    )
    text_key: str = key(
        "text", 'key of a document\'s text in a .jsonl line; token ids stand under "ids"', min_length=1
    )
    sequence_length: int = key(
        2048,
        "tokens of a packed sequence; a document that does not fit is cut, and each part starts at position 0",
        ge=2,
    )
    sequences_per_update: int = key(8, "packed sequences per update over all dp ranks", ge=1)
    held_out: str | None = key(
        None,
        "documents that are never trained on, of the same kinds as lm.data: their mean loss before the first update, "
        "every lm.eval_every updates and after the last",
        min_length=1,
    )
    eval_every: int = key(
        10, "updates between evaluations of lm.held_out; 0 = before the first and after the last only", ge=0
    )
