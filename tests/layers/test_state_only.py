"""Claim: a pass without a head leaves the same state, bit by bit, as one with a head, and does not run the
last layer's attention, output projection and MLP nor the final norm; the sweep of the prefix runs as short
and gives the same gradient.

Why the tests show it: the same tokens are fed to one model both ways, in one and in several pieces, and
every page is compared bit by bit; calls of each module are counted with forward hooks; the exact gradient
is computed with the short form and with the short form switched off.

Not shown: several ranks (tests/worlds hold the gradients of the short form against transformers in all
layouts).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from lifetimes.tiny import branches, gradient, ids, mean_loss, tiny_run

from megatron_lrl.layers.advance import advance
from megatron_lrl.layers.sequence import SequenceState
from megatron_lrl.lifetimes.run import Run
from megatron_lrl.lifetimes.window import UpdateWindow
from megatron_lrl.lifetimes.work import batches_of, work_of
from megatron_lrl.models.layer import PolicyLayer

TOKENS = ids(23, 5)
PIECES = ([23], [1, 9, 13], [8, 8, 7])


@pytest.fixture(scope="module")
def run(session_dir: Path) -> Iterator[Run]:
    with tiny_run(session_dir, "prefix.chunk_size=8") as run:
        yield run


@contextmanager
def counted_calls(run: Run) -> Iterator[Counter[str]]:
    """Calls, by name, of the last layer's parts, of the first layer's MLP and of the final norm that have rows."""
    decoder, calls = run.core(run.model).decoder, Counter[str]()
    first, last = decoder.layers[0], decoder.layers[-1]
    parts = {
        "first mlp": first.mlp, "qkv": last.self_attention.linear_qkv, "mlp": last.mlp,
        "attention": last.self_attention.core_attention, "projection": last.self_attention.linear_proj,
        "final norm": decoder.final_layernorm,
    }  # fmt: skip

    def counter(name: str):
        return lambda _module, inputs, _output: calls.update({name: int(inputs[0].shape[0] > 0)})

    with ExitStack() as hooks:
        for name, module in parts.items():
            hooks.callback(module.register_forward_hook(counter(name)).remove)
        yield calls


def grown(run: Run, pieces: list[int], head: object) -> list[torch.Tensor]:
    """The keys and values that the pieces leave, one tensor per page."""
    state, start = SequenceState(reserve={0: len(TOKENS)}), 0
    with torch.no_grad():
        for length in pieces:
            advance(run.model, state, [TOKENS[start : start + length]], head)  # type: ignore[arg-type]
            start += length
    return list(state.tensors())


@pytest.mark.parametrize("pieces", PIECES, ids=str)
def test_the_state_is_bit_equal_and_the_work_is_not_done(run: Run, pieces: list[int]) -> None:
    with counted_calls(run) as full:
        expected = grown(run, pieces, lambda hidden, _layout, _model: hidden)
    with counted_calls(run) as short:
        found = grown(run, pieces, None)
    assert len(found) == len(expected) == 2 * run.arch.num_layers
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert +full == Counter(dict.fromkeys(full, len(pieces)))
    assert +short == {"first mlp": len(pieces), "qkv": len(pieces)}


def exact_gradient(run: Run) -> torch.Tensor:
    responses = branches([3, 5])
    with UpdateWindow(run) as window:
        window.fix(branch.key for branch in responses)
        with window.prompt_group("g", TOKENS, "exact") as group:
            window.replay(group, work_of(batches_of(responses, 1), [mean_loss(0.1)] * 2))
        window.reduce()
        return gradient(run)


def test_the_sweep_is_as_short_and_its_gradient_the_same(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with counted_calls(run) as calls:
        short = exact_gradient(run)
    replays, chunks = 2, 3  # a prefix of 22 tokens in chunks of 8: captured, then swept
    assert calls["qkv"] == 2 * chunks + replays
    assert calls["attention"] == calls["mlp"] == calls["final norm"] == replays
    monkeypatch.setattr(PolicyLayer, "forward", PolicyLayer.__mro__[1].forward)
    with counted_calls(run) as calls:
        full = exact_gradient(run)
    assert calls["attention"] == 2 * chunks + replays
    assert torch.equal(short, full)
