"""Drafts of both drafters against an independent implementation, in `exact` numerics."""

from pathlib import Path

import pytest
from draft_vectors import DraftSet

from dsv4.testing.vectors import pure_deviation

VECTORS = Path(__file__).parents[1] / "vectors"
DRAFT_A, MTP_A = DraftSet.open(VECTORS / "draftA"), DraftSet.open(VECTORS / "mtpA.json")


@pytest.mark.parametrize("case_id", DRAFT_A.cases)
def test_dspark(dspark_llm, case_id):
    """Every round; the prompt in pieces, each way of cutting it for the first round alone."""
    *others, last = DRAFT_A.cases[case_id]["chunkings"]
    assert DRAFT_A.deviation(case_id, DRAFT_A.run(dspark_llm, case_id, last)) <= DRAFT_A.limit
    for chunks in (None, *others):
        first = DRAFT_A.run(dspark_llm, case_id, chunks, num_rounds=1)
        assert DRAFT_A.deviation(case_id, first) <= DRAFT_A.limit


@pytest.mark.parametrize("case_id", MTP_A.cases)
def test_mtp(exact_llm, case_id):
    last = MTP_A.cases[case_id]["chunkings"][-1]
    assert MTP_A.deviation(case_id, MTP_A.run(exact_llm, case_id, last)) <= MTP_A.limit


def test_the_target_itself(dspark_llm):
    case = DRAFT_A.cases["p131"]
    logits = dspark_llm.logits(case["prompt"])
    assert pure_deviation(logits[-1], DRAFT_A.expected["p131.r0.main"]) <= DRAFT_A.limit


def test_deviation_sees_a_wrong_draft(dspark_llm):
    rounds = DRAFT_A.run(dspark_llm, "p3", num_rounds=1)
    rounds[0].drafts[4] += 1
    assert DRAFT_A.deviation("p3", rounds) == float("inf")
