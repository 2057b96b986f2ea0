"""Routing as part of the policy: recorded while sampling, measured and used in replay.

    sampler   advance(..., routing=Recorder)          each fed response token: experts in order, and their weights
    replay    advance(..., routing=ReplayRouting)     own choice against the record ─► mismatch
                                                      use_recorded_routing: experts and weights of the record,
                                                      their gradient through the current router

Row i of a record belongs to the token whose output predicts token i of the response: row 0 to the last prompt token.
The prefix needs no record: sampler and replay read the same captured one. Every rank sees the rows of its own slots and
layers, so a record is put together over tp (under sequence parallelism), cp and pp.

Legend: n rows of a router on this rank, R response tokens, L expert layers, E experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lrl.experts.balance import TakenExperts
from megatron_lrl.experts.record import Routing
from megatron_lrl.layers.layout import TokenLayout
from megatron_lrl.layers.moe.routing import expert_layers
from megatron_lrl.lifetimes.run import Run


class Rows(NamedTuple):
    """Which rows of a router's input are response tokens."""

    row_n: Tensor
    branch_n: Tensor
    token_n: Tensor  # index of the response token that the row's output predicts

    def to(self, device: torch.device) -> Rows:
        """From the host, which knows them, without waiting for the device."""
        return Rows(*(x.to(device, non_blocking=True) for x in self))


def response_rows(layout: TokenLayout, core: Any, first: Sequence[int], lengths: Sequence[int]) -> Rows:
    """Rows of this rank that belong to responses, whose token 0 is predicted at positions ``first``; on the CPU.

    Under sequence parallelism a rank's router sees its tp slice of the slots.
    """
    config, tp = core.config, core.pg_collection.tp
    slots, start = layout.local_slots, layout.local_start
    if config.sequence_parallel:
        slots //= tp.size()
        start += tp.rank() * slots
    flat = torch.arange(start, start + slots)
    offsets, starts, firsts, counts = (
        torch.tensor(list(values), dtype=torch.long)
        for values in (layout.offsets[:-1], layout.starts, first, lengths)
    )
    branch = torch.searchsorted(offsets, flat, right=True) - 1
    token = starts[branch] + flat - offsets[branch] - firsts[branch]
    (row,) = torch.where((flat < layout.tokens) & (token >= 0) & (token < counts[branch]))
    return Rows(row, branch[row], token[row])


class Recorder:
    """Collects the routing of responses while they are sampled. Every rank of the replica makes one."""

    def __init__(self, run: Run, longest: int) -> None:
        """``longest``: tokens of a response, at most."""
        self.run, self.longest = run, longest
        self.active: list[int] = []  # branch of the pass -> number of its response
        self.first: list[int] = []  # and position whose output predicts the response's token 0
        self._parts: dict[int, list[tuple[Tensor, Tensor, Tensor, Tensor]]] = {}  # by layer
        self._rows: Rows | None = None
        self._response_n = torch.zeros(0, dtype=torch.long)

    def begin(self, layout: TokenLayout, core: Any) -> Recorder:
        """Before a pass; `active` and `first` say which response each branch is."""
        rows = response_rows(layout, core, self.first, [self.longest] * len(self.first))
        device = _device(core)
        self._rows = rows.to(device)
        self._response_n = torch.tensor(self.active)[rows.branch_n].to(device, non_blocking=True)
        return self

    def chosen(self, layer_number: int, expert_nk: Tensor) -> Tensor:
        """The router's own choice."""
        return expert_nk

    def weighed(self, layer_number: int, scores_nE: Tensor, expert_nk: Tensor, weight_nk: Tensor) -> Tensor:
        """Keep the rows of responses."""
        assert self._rows is not None
        row_n, _, token_n = self._rows
        # Finished branches are fed on; `records` cuts what their responses no longer hold.
        part = (self._response_n, token_n, expert_nk[row_n], weight_nk.detach()[row_n])
        self._parts.setdefault(layer_number - 1, []).append(part)
        return weight_nk

    def records(self, first: int, lengths: Sequence[int]) -> list[Routing]:
        """Records of the responses from number ``first`` on, of ``lengths`` tokens, on every rank; they are taken out.

        Collective over the replica.
        """
        run, runtime = self.run, self.run.runtime
        moe, layers = run.arch.moe, expert_layers(run.arch)
        assert moe is not None
        longest = max(lengths)
        # One row more than the longest response has, for what finished branches were fed on.
        shape = (len(lengths), longest + 1, len(layers), moe.top_k)
        expert = torch.zeros(shape, dtype=torch.int64, device=runtime.device)
        weight = torch.zeros(shape, dtype=run.precision.accumulation, device=runtime.device)
        for layer, parts in self._parts.items():
            rows = [torch.cat(columns) for columns in zip(*parts, strict=True)]
            mine_n = (rows[0] >= first) & (rows[0] < first + len(lengths))
            response_n, token_n, expert_nk, weight_nk = (x[mine_n] for x in rows)
            place = (response_n - first, token_n.clamp(max=longest), layers.index(layer))
            expert[place], weight[place] = expert_nk, weight_nk.to(run.precision.accumulation)
            rest = [x[~mine_n] for x in rows]
            self._parts[layer] = [(rest[0], rest[1], rest[2], rest[3])]
        groups = runtime.groups
        parallel = [groups.tp] if run.core(run.model).config.sequence_parallel else []
        for group in (*parallel, groups.cp, groups.pp):
            if group.size() > 1:  # every row lies on one rank, the others hold zeros
                dist.all_reduce(expert, group=group)
                dist.all_reduce(weight, group=group)
        expert, weight = expert.cpu(), weight.cpu()
        return [Routing.of(layers, expert[j, :n], weight[j, :n]) for j, n in enumerate(lengths)]


class ReplayRouting:
    """Goes with one micro-batch of responses through all its passes."""

    def __init__(
        self,
        run: Run,
        records: Sequence[Routing | None],
        first: Sequence[int],
        lengths: Sequence[int],
        balance: float = 0.0,
    ) -> None:
        """``records``: of each branch, if it has one. ``balance``: weight of a response's auxiliary loss."""
        self.run, self.first, self.lengths = run, list(first), list(lengths)
        self.records = [None if record is None else (record.layers, *record.tensors()) for record in records]
        self.balance, self.totals = balance, run.routing
        self.use = run.config.replay.use_recorded_routing
        self._rows: Rows | None = None
        self._layers: tuple[int, ...] = ()
        self._found: tuple[Tensor, Tensor, Tensor] | None = (
            None  # rows with a record, its experts and weights, [n, L, k]
        )

    def begin(self, layout: TokenLayout, core: Any) -> ReplayRouting:
        """Before a pass: everything that its layers need goes to the device at once."""
        device, rows_n = _device(core), response_rows(layout, core, self.first, self.lengths)
        self._rows, self._found = rows_n.to(device), None
        rows, experts, weights = [], [], []
        for branch, record in enumerate(self.records):
            if record is None:
                continue
            mine_n = rows_n.branch_n == branch
            token_n = rows_n.token_n[mine_n]
            rows.append(rows_n.row_n[mine_n])
            self._layers, expert_RLk, weight_RLk = record
            experts.append(expert_RLk[token_n])
            weights.append(weight_RLk[token_n])
        if rows:
            row_n, expert_nLk, weight_nLk = (
                torch.cat(x).to(device, non_blocking=True) for x in (rows, experts, weights)
            )
            self._found = row_n, expert_nLk, weight_nLk
        return self

    def chosen(self, layer_number: int, expert_nk: Tensor) -> Tensor:
        """The experts of the record, where it is to be used; measures the mismatch in passes with a gradient."""
        found = self._recorded(layer_number)
        if found is None:
            return expert_nk
        row_n, recorded_nk, _ = found
        if torch.is_grad_enabled():
            self.totals.compare(expert_nk[row_n], recorded_nk)
        return expert_nk.index_copy(0, row_n, recorded_nk) if self.use else expert_nk

    def weighed(self, layer_number: int, scores_nE: Tensor, expert_nk: Tensor, weight_nk: Tensor) -> Tensor:
        """The weights of the record, where it is to be used, with the gradient of the router's own."""
        assert self._rows is not None
        if torch.is_grad_enabled():  # each response token counts once: in its pass with a gradient
            taken = TakenExperts(self.run, self._rows.row_n, self._rows.branch_n, scores_nE, expert_nk)
            if self.run.config.moe.router_bias_update_rate:
                self.totals.add_load(layer_number, taken.load())
            if self.balance:
                weight_nk = taken.with_loss(weight_nk, self.lengths, self.balance)
        found = self._recorded(layer_number)
        if found is None:
            return weight_nk
        row_n, recorded_nk, recorded_weight_nk = found
        recorded_weight_nk = recorded_weight_nk.to(weight_nk.dtype)
        if torch.is_grad_enabled():
            self._difference(expert_nk[row_n], weight_nk.detach()[row_n], recorded_nk, recorded_weight_nk)
        if not self.use:
            return weight_nk
        # The value is the record's, the slope the current router's (straight through): what is added is exactly 0.
        constant_nk = weight_nk.detach()
        return constant_nk.index_copy(0, row_n, recorded_weight_nk) + (weight_nk - constant_nk)

    def _recorded(self, layer_number: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Rows with a record, and what it says of this layer."""
        if self._found is None:
            return None
        row_n, expert_nLk, weight_nLk = self._found
        layer = self._layers.index(layer_number - 1)  # the same in every record of a model
        return row_n, expert_nLk[:, layer], weight_nLk[:, layer]

    def _difference(
        self, own_nk: Tensor, weight_nk: Tensor, recorded_nk: Tensor, recorded_weight_nk: Tensor
    ) -> None:
        """The largest difference of a weight, among rows with the same experts."""
        own_order, order = own_nk.argsort(-1), recorded_nk.argsort(-1)
        same_n = (own_nk.gather(-1, own_order) == recorded_nk.gather(-1, order)).all(-1)
        gap_nk = weight_nk.gather(-1, own_order) - recorded_weight_nk.gather(-1, order)
        self.totals.compare_weights(gap_nk, same_n)


def _device(core: Any) -> torch.device:
    """Where a model's activations are."""
    return core.rotary_pos_emb.inv_freq.device
