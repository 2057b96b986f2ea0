"""What the default tests leave out because it takes long, beside worlds beyond the covering set; one place, by name.

Each has a cheaper neighbour that stays: the same claim for another family, world, contract or size.
"""

from __future__ import annotations

import pytest

COSTLY = frozenset({
    # the other audited job is one rank's
    "tests/cuda_audit/test_audit.py::test_the_program_keeps_to_the_device_and_to_nccl[cp2-qwen3_5_moe-vl-bfloat16]",
    "tests/layers/lastkv/test_lastkv_restarts.py::test_fewer_restarts_change_no_bit[one]",
    "tests/layers/lastkv/test_lastkv_hybrid.py::test_grad_of_a_lastkv_hybrid[pp2]",
    "tests/worlds/test_invariance.py::test_execution_does_not_change_the_gradient[cp2-pp2-exact-float64-qwen3-tied-yarn-1e-12]",
    "tests/worlds/test_invariance.py::test_truncation_ends_in_the_other_contracts_bit_for_bit[tp2-cp2]",
    "tests/worlds/test_invariance.py::test_a_model_that_amplifies_rounding_moves_less_than_half_an_ulp_moves_it",
    "tests/worlds/test_residual.py::test_a_float32_stream_in_a_bfloat16_model[llama-lastkv]",
    "tests/worlds/test_residual.py::test_sampler_and_replay_come_closer[llama-12-lastkv]",
    "tests/worlds/test_residual.py::test_a_float32_model_does_not_change_by_a_bit[tp2-pp2-llama-lastkv]",
    "tests/worlds/test_memory.py::test_the_live_graph_does_not_grow_with_the_group[tp2-cp2-response_only]",
    "tests/worlds/test_hybrid.py::test_score_and_grad_are_those_of_transformers[pp2-dp2-ep2]",
    "tests/worlds/test_hybrid.py::test_memory_is_flat_and_snapshots_are_budgeted[pp2]",
    "tests/worlds/test_moe.py::test_rounds_of_lastkv_keep_step[pp2-dp2-ep2]",
    "tests/worlds/test_trees.py::test_trees_of_every_layer_kind[cp2-dp2]",
    "tests/worlds/test_trees.py::test_gradients_of_a_tree[tp2-cp2-pp2]",
    "tests/worlds/test_offsets.py::test_no_world_is_farther_from_float64_than_one_rank[tp2-cp2-pp2]",
    "tests/worlds/test_residual.py::test_a_float32_stream_in_a_bfloat16_model[qwen3_5-full]",
    "tests/cli/test_file_source.py::test_recorded_groups_make_the_updates_of_the_run_that_sampled_them[cp2-dp2]",
    *(f"tests/worlds/test_same_bits.py::{case}" for case in (
        "test_four_tensor_ranks_add_in_their_order[tp4]",
        "test_trees_cuts_order_and_graphs_leave_no_trace[lastkv-cp2-dp2]",
        "test_trees_cuts_order_and_graphs_leave_no_trace[full-cp2-dp2]",
        "test_trees_cuts_order_and_graphs_leave_no_trace[lastkv-one]",
        "test_chunks_and_batches_leave_no_trace[cp2-dp2]",
        "test_experts_keep_the_bits[pp2-dp2-ep2]",
        "test_experts_keep_the_bits[dp2-ep2]",
        "test_check_names_where_they_part[tp2-cp2-pp2]")),
    "tests/cli/test_resume.py::test_three_and_three_updates_are_six[cp2]",
    # a whole run for every place where a disk can fill
    *(f"tests/cli/test_full_disk.py::test_a_full_disk_ends_{what}" for what in (
        "training_with_one_message_and_loses_nothing", "an_export_and_an_import")),
    "tests/rl/test_learning.py::test_against_its_advantages_it_falls[lastkv, exact]",
    "tests/rl/test_learning.py::test_reward_rises[full, response_only]",
    "tests/rl/test_learning.py::test_reward_rises[lastkv, exact]",
    "tests/checkpoint/test_conversion_memory.py::test_a_small_model_in_four_shards",
    "tests/plan/test_plan_speed.py::test_extrapolated_chunks_take_what_all_of_them_take[one]",
    "tests/plan/test_plan_lastkv.py::test_planned_bytes_are_measured_bytes[cp2-pp2-Z16-4]",
    "tests/plan/test_plan_families.py::test_planned_bytes_are_measured_bytes[qwen3_moe-sparse-pp2]",
    "tests/plan/test_plan_families.py::test_planned_bytes_are_measured_bytes[qwen3_5_moe-vl-cp2-ep2]",
    "tests/plan/test_plan.py::test_planned_bytes_are_measured_bytes[pp2]",
    *(f"tests/layers/lastkv/test_lastkv_grad.py::test_grad_in_float64[{case}]" for case in (
        "qwen3-tied-yarn-C16-truncated1", "qwen2-C16-response_only", "qwen3-C16-truncated19-no-blend",
        "qwen3-C3-conventional")),
    *(f"tests/layers/lastkv/test_lastkv_logits.py::test_logits_follow_the_definition[{case}]" for case in (
        "C1-no-blend", "C16", "C64-no-blend")),
    *(f"tests/worlds/test_fp64_families.py::test_grad_in_float64[{case}]" for case in (
        "qwen3_5-vl", "qwen3_next", "glm4_moe-groups", "glm4_moe_lite", "deepseek_v3")),
    "tests/adapters/test_verbs.py::test_two_and_two_updates_are_four_and_the_base_stays[tp2-dp2]",
    *(f"tests/worlds/test_adapters.py::test_score_and_grad_are_those_of_the_merged_model[{world}]" for world in (
        "cp2-dp2", "dp2-ep2")),
    *(f"tests/worlds/test_latent.py::test_score_and_grad_are_those_of_transformers[{world}]" for world in (
        "cp2-dp2", "dp2-ep2")),
    "tests/cli/test_resume.py::test_a_run_stops_before_its_wall_time_is_over[cp2]",
    "tests/cli/test_resume.py::test_a_signal_stops_with_a_checkpoint[dp2]",
    "tests/worlds/test_decode.py::test_together_samples_what_each_group_samples_alone[one]",
    "tests/worlds/test_hybrid.py::test_score_and_grad_are_those_of_transformers[cp2-dp2]",
    "tests/worlds/test_same_bits.py::test_the_gradient_is_that_of_plain_autograd[tp2-cp2-pp2]",
    "tests/worlds/test_sampler.py::test_sampled_logprobs_are_those_of_replay[cp2-dp2]",
    "tests/worlds/test_memory.py::test_the_live_graph_does_not_grow_with_the_group[tp2-cp2-exact]",
    "tests/layers/lastkv/test_lastkv_grad.py::test_grad_in_every_world[cp2-dp2]",
    "tests/layers/lastkv/test_lastkv_logits.py::test_logits_follow_the_definition[C3-no-blend]",
    "tests/rl/test_rl_lm.py::test_held_out_loss_is_that_of_the_model_after_each_step[C8-pp2]",
    "tests/checkpoint/test_lastkv_conversion.py::test_a_run_that_converted_on_load_saves_and_resumes_its_gates[one-tp2-pp2]",
    "tests/checkpoint/test_family_roundtrip.py::test_both_sources_fill_the_same_parameters[pp2-dp2-ep2]",
})  # fmt: skip
"""Tests by node id: one case, or with a name alone all cases."""

FIRST = (
    "tests/worlds/",
    "tests/cuda_audit/",
    "tests/layers/",
    "tests/rl/",
    "tests/checkpoint/",
    "tests/cli/",
)
"""Folders in the order of what a module takes: two modules at a time then end together."""


def mark_costly(items: list[pytest.Item], whole_modules: bool) -> None:
    """Marks `COSTLY` as slow; ``whole_modules``: every case was collected, so that a stale name shows."""
    found = set()
    for item in items:
        for name in (item.nodeid, item.nodeid.split("[")[0]):
            if name in COSTLY:
                item.add_marker(pytest.mark.slow)
                found.add(name)
    files = {item.nodeid.split("::")[0] for item in items}
    stale = sorted(name for name in COSTLY - found if name.split("::")[0] in files)
    if stale and whole_modules:
        raise pytest.UsageError(f"harness/costly.py names tests that do not exist: {', '.join(stale)}")


def order(items: list[pytest.Item]) -> None:
    """Long modules first; modules stay whole."""

    def place(item: pytest.Item) -> int:
        return next((i for i, folder in enumerate(FIRST) if item.nodeid.startswith(folder)), len(FIRST))

    items.sort(key=place)
