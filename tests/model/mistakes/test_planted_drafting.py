"""Every known way to get a drafter wrong must move its drafts far outside the limits of the vectors."""

from pathlib import Path

import mistakes_of_drafting as drafting
import pytest
from draft_vectors import DraftSet
from planted import Bed

from dsv4 import LLM
from dsv4.model.dspark import DSparkDrafter
from dsv4.model.mtp_drafter import MtpDrafter

VECTORS = Path(__file__).parents[2] / "vectors"
DRAFT_A, MTP_A = DraftSet.open(VECTORS / "draftA"), DraftSet.open(VECTORS / "mtpA.json")
WIDE_FACTOR = 100  # a mistake moves a value by at least this many limits

# (mistake, case, rounds): the shortest case and the fewest rounds in which it must show
DSPARK = [
    (drafting.tap_of_the_first_stream, "p3", 1),
    (drafting.tap_before_the_write_back, "p3", 1),
    (drafting.tap_without_the_last_sublayer, "p3", 1),
    (drafting.tap_of_the_streams_that_enter, "p3", 1),
    (drafting.taps_in_reverse, "p3", 1),
    (drafting.no_main_norm, "p3", 1),
    (drafting.context_through_attn_norm, "p3", 1),
    (drafting.context_one_position_late, "p3", 1),
    (drafting.context_rope_one_off, "p3", 1),
    (drafting.compressed_frequencies, "p3", 1),
    (drafting.causal_block, "p3", 1),
    (drafting.window_one_short, "p128", 1),
    (drafting.window_that_slides, "p128", 1),
    (drafting.block_without_its_own_rows, "p3", 1),
    (drafting.block_without_context, "p3", 1),
    (drafting.output_unrotated_from_the_last_position, "p3", 1),
    (drafting.output_not_unrotated, "p3", 1),
    (drafting.block_one_position_late, "p3", 1),
    (drafting.noise_id_one_off, "p3", 1),
    (drafting.every_row_the_anchor, "p3", 1),
    (drafting.anchor_in_the_last_row, "p3", 1),
    (drafting.shared_experts_dropped, "p3", 1),
    (drafting.rows_one_late, "p3", 1),
    (drafting.the_targets_norm, "p3", 1),
    (drafting.the_targets_collapse, "p3", 1),
    (drafting.no_markov_bias, "p3", 1),
    (drafting.markov_matrices_swapped, "p3", 1),
    (drafting.markov_of_the_anchor_alone, "p3", 1),
    (drafting.confidence_behind_the_norm, "p3", 1),
    (drafting.confidence_embedding_first, "p3", 1),
    (drafting.confidence_without_embedding, "p3", 1),
    (drafting.confidence_of_the_draft_itself, "p3", 1),
    (drafting.never_extended_after_the_prompt(DSparkDrafter), "p3", 2),
    (drafting.rejected_rows_kept, "p3", 2),
]
MTP = [
    (drafting.ids_not_shifted, "p3", 1),
    (drafting.border_repeats_its_token, "p10", 1),
    (drafting.recursion_from_one_stream, "p3", 1),
    (drafting.recursion_stands_still, "p3", 1),
    (drafting.recursion_skips_a_position, "p3", 1),
    (drafting.recursion_from_the_targets_streams, "p3", 1),
    (drafting.first_draft_of_the_last_row, "p3", 2),
    (drafting.mtp_with_the_targets_head, "p3", 1),
    (drafting.projections_swapped, "p3", 1),
    (drafting.no_embedding_at_position_0, "p3", 1),
    (drafting.compressed_frequencies, "p3", 1),
    (drafting.never_extended_after_the_prompt(MtpDrafter), "p3", 3),
    (drafting.rejected_rows_kept, "p3", 2),
]


@pytest.fixture(scope="module")
def dspark_llm():
    return LLM(VECTORS / "draftA" / "model", numerics="exact")


def name_of(value):
    return getattr(value, "__name__", None)


def assert_seen(vectors, llm, patch, mistake, case_id, num_rounds):
    mistake(Bed(llm, patch))
    chunks = vectors.cases[case_id]["chunkings"][0]
    found = vectors.run(llm, case_id, chunks, num_rounds)
    assert vectors.deviation(case_id, found) > WIDE_FACTOR * vectors.limit


@pytest.mark.parametrize(("mistake", "case_id", "num_rounds"), DSPARK, ids=name_of)
def test_dspark(dspark_llm, monkeypatch, mistake, case_id, num_rounds):
    assert_seen(DRAFT_A, dspark_llm, monkeypatch, mistake, case_id, num_rounds)


@pytest.mark.parametrize(("mistake", "case_id", "num_rounds"), MTP, ids=name_of)
def test_mtp(exact_llm, monkeypatch, mistake, case_id, num_rounds):
    assert_seen(MTP_A, exact_llm, monkeypatch, mistake, case_id, num_rounds)
