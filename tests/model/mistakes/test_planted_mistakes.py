"""Every known way to get the model wrong must move it far outside the limits of the vectors; the right model stays in.

A mistake that no check sees is a hole in the vectors or in the checks, so each one names the check that must see it.
Rounding mistakes (`official` numerics) are in test_planted_rounding.py.
"""

import mistakes_of_maths as maths
import mistakes_of_memory as memory
import pytest
from planted import CSA, HCA, OUTPUTS, SWA, Bed, layer_deviations

from dsv4 import LLM
from dsv4.formats.e8m0 import e8m0_to_float
from dsv4.formats.fp4 import unpack_nibbles
from dsv4.testing.vectors import PURE_LAYER_RELATIVE, PURE_LOGITS_ABS, pure_deviation

WIDE_FACTOR = 100  # a mistake moves a value by at least this many limits; most reach ten thousand
INSIDE_A_BLOCK = (126, 10)  # chunks whose border cuts a CSA block and the HCA block
BETWEEN_BLOCKS = (64, 72)  # chunks whose border is a multiple of 4: only the carry crosses it
MTP_TOKENS = 24


@pytest.fixture
def bed(exact_llm, monkeypatch):
    return Bed(exact_llm, monkeypatch)


# mistakes by the layers of set A in each of which they must show
IN_A_BLOCK = {
    (SWA, HCA, CSA): (
        maths.transposed_comb, maths.one_sinkhorn_iteration, maths.shared_expert_without_clamp,
        maths.routed_experts_without_clamp, maths.rope_on_the_first_dims, maths.rope_on_split_halves,
        maths.output_not_unrotated, maths.output_rotated_forward, memory.window_one_short, memory.window_one_long,
        memory.no_sink, memory.sink_in_the_numerator,
    ),
    (SWA,): (
        maths.sinkhorn_of_columns_first, maths.norm_of_each_stream, maths.post_without_the_factor_two,
        maths.uniform_hash_weights, maths.yarn_on_swa_layers, maths.compressed_theta_on_swa_layers,
    ),
    (HCA, CSA): (
        maths.bias_in_router_weights, maths.main_theta_on_compressed_layers, maths.no_yarn_on_compressed_layers,
        maths.mscale_in_cos_and_sin, maths.mscale_in_the_softmax, memory.no_ape, memory.block_in_progress_visible,
        memory.own_block_hidden, memory.no_causal_limit_in_prefill, memory.entries_written_after_attention,
    ),
    (HCA,): (
        maths.bias_ignored_in_the_choice,
    ),
    (SWA, HCA): (
        maths.no_route_scale, maths.router_weights_not_normalised,
    ),
    (CSA,): (
        memory.own_block_carry, memory.halves_swapped, memory.no_overlap, memory.ape_stacked_twice,
        memory.entry_position_is_its_index, memory.csa_entry_position_is_its_last_token, memory.indexer_without_relu,
        memory.indexer_queries_without_rope, memory.indexer_without_rope, memory.indexer_without_head_weights,
        memory.every_visible_entry_read, memory.latest_entries_read,
    ),
}  # fmt: skip
# (mistake, layers, chunks)
CHUNK_BORDERS = [
    (memory.window_lost, (SWA, HCA, CSA), INSIDE_A_BLOCK),
    (memory.tails_lost, (HCA, CSA), INSIDE_A_BLOCK),
    (memory.tails_lost, (CSA,), BETWEEN_BLOCKS),
    (memory.own_tail_lost, (HCA, CSA), INSIDE_A_BLOCK),
    (memory.carry_lost, (CSA,), BETWEEN_BLOCKS),
    (memory.index_carry_lost, (CSA,), BETWEEN_BLOCKS),
    (memory.every_chunk_at_position_zero, (SWA, HCA, CSA), INSIDE_A_BLOCK),
    (memory.every_chunk_at_position_zero, (SWA, HCA, CSA), BETWEEN_BLOCKS),
]
MTP = [
    memory.mtp_norm_of_all_streams,
    memory.mtp_without_hnorm,
    memory.mtp_without_embedding,
    memory.mtp_with_the_current_token,
]


def name_of(value):
    return value.__name__ if callable(value) else None


def farthest(deviations):
    return max(deviations[name] for name in OUTPUTS)


def mtp_deviation(llm, set_a):
    """The first rows of the MTP case; later ones need a longer run of the main model and show nothing more."""
    case = next(case for case in set_a.cases["cases"] if case["id"] == "mtp_p150")
    positions = [position for position in case["positions"] if position < MTP_TOKENS - 1]
    assert len(positions) > 2
    want = set_a.expected("expected_pure")[case["logits"]][: len(positions)]
    return pure_deviation(llm.mtp_logits(set_a.token_ids(case)[:MTP_TOKENS])[positions], want)


def prefill_deviation(llm, set_a):
    case = next(case for case in set_a.cases["cases"] if case["id"] == "p300")
    want = set_a.expected("expected_pure")[case["logits"]]
    return pure_deviation(llm.logits(set_a.token_ids(case))[case["positions"]], want)


@pytest.mark.parametrize("layer_idx", [SWA, HCA, CSA])
@pytest.mark.parametrize("chunks", [None, INSIDE_A_BLOCK, BETWEEN_BLOCKS])
def test_unplanted_blocks_are_within_the_limit(exact_llm, set_a, layer_idx, chunks):
    deviations = layer_deviations(exact_llm, set_a, layer_idx, chunks)
    assert farthest(deviations) <= PURE_LAYER_RELATIVE
    if chunks is None:  # which of two entries with equal scores is picked may depend on the chunk
        assert deviations.get("entries", 0) == 0


def test_unplanted_logits_are_within_the_limit(exact_llm, set_a):
    assert prefill_deviation(exact_llm, set_a) <= PURE_LOGITS_ABS
    assert mtp_deviation(exact_llm, set_a) <= PURE_LOGITS_ABS


@pytest.mark.parametrize(
    ("plant", "layers"), [(plant, layers) for layers, plants in IN_A_BLOCK.items() for plant in plants], ids=name_of
)
def test_mistake_shows_in_a_block(bed, set_a, plant, layers):
    plant(bed)
    for layer_idx in layers:
        assert farthest(layer_deviations(bed.llm, set_a, layer_idx)) > WIDE_FACTOR * PURE_LAYER_RELATIVE, layer_idx


@pytest.mark.parametrize(("plant", "layers", "chunks"), CHUNK_BORDERS, ids=name_of)
def test_state_lost_at_a_chunk_border_shows(bed, set_a, plant, layers, chunks):
    plant(bed)
    for layer_idx in layers:
        deviations = layer_deviations(bed.llm, set_a, layer_idx, chunks)
        assert farthest(deviations) > WIDE_FACTOR * PURE_LAYER_RELATIVE, layer_idx


def test_lower_clamp_of_the_gate_shows(bed, set_a):
    """silu is almost 0 below -10, so this one moves a block by little more than the limit, yet always over it.

    test_huggingface.py repeats it with a limit at which it moves the logits a hundred times further.
    """
    maths.gate_clamped_below_too(bed)
    assert all(farthest(layer_deviations(bed.llm, set_a, layer)) > PURE_LAYER_RELATIVE for layer in (SWA, HCA, CSA))


def test_position_of_hca_entries_shows(bed, set_a):
    """Entry 0 is at position 0 either way; the second one needs a longer prompt than the single blocks have."""
    memory.hca_entry_position_is_its_index(bed)
    assert prefill_deviation(bed.llm, set_a) > WIDE_FACTOR * PURE_LOGITS_ABS


@pytest.mark.parametrize("plant", MTP, ids=name_of)
def test_mistake_shows_in_mtp(bed, set_a, plant):
    plant(bed)
    assert mtp_deviation(bed.llm, set_a) > WIDE_FACTOR * PURE_LOGITS_ABS


def swapped_nibbles(bed):
    bed.function(unpack_nibbles, lambda right, packed: right(packed).unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


def scale_byte_taken_for_a_number(bed):
    bed.function(e8m0_to_float, lambda right, codes: codes.float())


@pytest.mark.parametrize("plant", [swapped_nibbles, scale_byte_taken_for_a_number], ids=name_of)
def test_mistake_in_decoding_shows(bed, set_a, plant):
    plant(bed)
    misread = LLM(set_a.model_path, numerics="exact")
    assert farthest(layer_deviations(misread, set_a, SWA)) > WIDE_FACTOR * PURE_LAYER_RELATIVE
