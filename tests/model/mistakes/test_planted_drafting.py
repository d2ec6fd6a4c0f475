"""Every known way to get a drafter wrong must move its drafts far outside the limits of the vectors."""

from pathlib import Path

import mistakes_of_drafting as drafting
import pytest
from draft_vectors import DraftSet
from planted import Bed

from dsv4.model.dspark import DSparkDrafter
from dsv4.model.mtp_drafter import MtpDrafter

VECTORS = Path(__file__).parents[2] / "vectors"
DRAFT_A, MTP_A = DraftSet.open(VECTORS / "draftA"), DraftSet.open(VECTORS / "mtpA.json")
WIDE_FACTOR = 100  # a mistake moves a value by at least this many limits

# a mistake, or (mistake, case, rounds): the shortest case and the fewest rounds in which it must show, p3 and one
DSPARK = [
    drafting.tap_of_the_first_stream, drafting.tap_before_the_write_back, drafting.tap_without_the_last_sublayer,
    drafting.tap_of_the_streams_that_enter, drafting.taps_in_reverse, drafting.no_main_norm,
    drafting.context_through_attn_norm, drafting.context_one_position_late, drafting.context_rope_one_off,
    drafting.compressed_frequencies, drafting.causal_block, drafting.block_without_its_own_rows,
    drafting.block_without_context, drafting.output_unrotated_from_the_last_position, drafting.output_not_unrotated,
    drafting.block_one_position_late, drafting.noise_id_one_off, drafting.every_row_the_anchor,
    drafting.anchor_in_the_last_row, drafting.shared_experts_dropped, drafting.rows_one_late,
    drafting.the_targets_norm, drafting.the_targets_collapse, drafting.no_markov_bias,
    drafting.markov_matrices_swapped, drafting.markov_of_the_anchor_alone, drafting.confidence_behind_the_norm,
    drafting.confidence_embedding_first, drafting.confidence_without_embedding,
    drafting.confidence_of_the_draft_itself,
    (drafting.window_one_short, "p128", 1), (drafting.window_that_slides, "p128", 1),
    (drafting.never_extended_after_the_prompt(DSparkDrafter), "p3", 2), (drafting.rejected_rows_kept, "p3", 2),
]  # fmt: skip
MTP = [
    drafting.ids_not_shifted, drafting.recursion_from_one_stream, drafting.recursion_stands_still,
    drafting.recursion_skips_a_position, drafting.recursion_from_the_targets_streams,
    drafting.mtp_with_the_targets_head, drafting.projections_swapped, drafting.no_embedding_at_position_0,
    drafting.compressed_frequencies,
    (drafting.border_repeats_its_token, "p10", 1), (drafting.first_draft_of_the_last_row, "p3", 2),
    (drafting.never_extended_after_the_prompt(MtpDrafter), "p3", 3), (drafting.rejected_rows_kept, "p3", 2),
]  # fmt: skip


def cases(mistakes):
    rows = [one if isinstance(one, tuple) else (one, "p3", 1) for one in mistakes]
    return pytest.mark.parametrize(
        ("mistake", "case_id", "num_rounds"), rows, ids=lambda value: getattr(value, "__name__", None)
    )


def assert_seen(vectors, llm, patch, mistake, case_id, num_rounds):
    mistake(Bed(llm, patch))
    chunks = vectors.cases[case_id]["chunkings"][0]
    found = vectors.run(llm, case_id, chunks, num_rounds)
    assert vectors.deviation(case_id, found) > WIDE_FACTOR * vectors.limit


@cases(DSPARK)
def test_dspark(dspark_llm, monkeypatch, mistake, case_id, num_rounds):
    assert_seen(DRAFT_A, dspark_llm, monkeypatch, mistake, case_id, num_rounds)


@cases(MTP)
def test_mtp(exact_llm, monkeypatch, mistake, case_id, num_rounds):
    assert_seen(MTP_A, exact_llm, monkeypatch, mistake, case_id, num_rounds)
