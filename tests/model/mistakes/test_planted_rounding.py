"""Every quantisation point of `official` numerics: left out, moved or added, a block leaves the strict limits.

The logits cannot show this (rounding differences grow until they are as large as the quantisation itself); a single
block on a given input can. Not listed, because no check of ours sees it: one activation scale per row instead of one
per 128 channels, which changes E4M3 values only where they fall below its smallest normal number.
"""

import mistakes_of_rounding as rounding
import pytest
from planted import CSA, HCA, SWA, Bed, layer_deviations

from dsv4.testing.vectors import STRICT_LAYER

CLOSER = 1.2  # the published place is closer to the published values than the other one, by this factor at least

# (mistake, layer of set A, output of the block that leaves its limit)
IN_AN_OP = [
    (rounding.no_activation_quantisation, SWA, "attn_out"),
    (rounding.no_activation_quantisation, HCA, "attn_out"),
    (rounding.no_activation_quantisation, CSA, "attn_out"),
    (rounding.no_activation_quantisation_in_attention, CSA, "attn_out"),
    (rounding.no_activation_quantisation_in_experts, SWA, "ffn_out"),
    (rounding.no_activation_quantisation_in_experts, CSA, "ffn_out"),
    (rounding.activation_scale_not_a_power_of_two, SWA, "attn_out"),
    (rounding.activation_scale_not_a_power_of_two, CSA, "ffn_out"),
    (rounding.fp8_before_wo_a, SWA, "attn_out"),
    (rounding.fp8_before_wo_a, HCA, "attn_out"),
    (rounding.fp8_before_wo_a, CSA, "attn_out"),
    (rounding.fp8_before_the_compressor, CSA, "attn_out"),
    (rounding.no_hadamard, CSA, "entries"),
    (rounding.no_quantisation_of_index_queries, CSA, "entries"),
]
IN_THE_CACHE = [
    (rounding.plain_kv_rows, HCA, "attn_out"),
    (rounding.plain_kv_rows, CSA, "attn_out"),
    (rounding.rope_dims_in_fp8_rows, CSA, "attn_out"),
    (rounding.plain_index_rows, CSA, "entries"),
    (rounding.fp8_index_rows, CSA, "entries"),
]


@pytest.fixture
def bed(official_llm, monkeypatch):
    return Bed(official_llm, monkeypatch)


def name_of(value):
    return value.__name__ if callable(value) else None


@pytest.mark.parametrize("layer_idx", [SWA, HCA, CSA])
def test_unplanted_blocks_are_within_the_strict_limits(official_llm, set_a, layer_idx):
    deviations = layer_deviations(official_llm, set_a, layer_idx)
    assert {name for name, value in deviations.items() if value > STRICT_LAYER[name]} == set()


@pytest.mark.parametrize(("plant", "layer_idx", "output"), IN_AN_OP, ids=name_of)
def test_quantisation_point_of_an_op_shows(bed, set_a, plant, layer_idx, output):
    plant(bed)
    assert layer_deviations(bed.llm, set_a, layer_idx)[output] > STRICT_LAYER[output]


@pytest.mark.parametrize(("views", "layer_idx", "output"), IN_THE_CACHE, ids=name_of)
def test_quantisation_of_the_cache_shows(official_llm, set_a, views, layer_idx, output):
    assert layer_deviations(official_llm, set_a, layer_idx, views=views)[output] > STRICT_LAYER[output]


def test_routing_weight_belongs_before_w2(bed, set_a):
    """After w2 stays within the strict limit, so the two places are compared with each other."""
    right = layer_deviations(bed.llm, set_a, CSA)["ffn_out"]
    rounding.routing_weight_after_w2(bed)
    assert layer_deviations(bed.llm, set_a, CSA)["ffn_out"] > CLOSER * right


@pytest.mark.parametrize(
    ("views", "layer_idx"),
    [(rounding.plain_window_rows, SWA), (rounding.plain_window_rows, HCA), (rounding.plain_entry_rows, CSA)],
    ids=name_of,
)
def test_window_and_entries_are_both_quantised(official_llm, set_a, views, layer_idx):
    """Either alone stays near the strict limit; with it the block is closer to the published values."""
    right = layer_deviations(official_llm, set_a, layer_idx)["attn_out"]
    assert layer_deviations(official_llm, set_a, layer_idx, views=views)["attn_out"] > CLOSER * right
