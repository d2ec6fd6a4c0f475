"""The whole model against DeepSeek's own code: logits, single blocks, experts and picked entries of set A."""

import hashlib
import json
from functools import cache
from pathlib import Path

import pytest
import torch
from draft_vectors import DraftSet

from dsv4.testing import vectors
from dsv4.testing.vectors import pure_deviation

SET_A = Path(__file__).parents[1] / "vectors" / "setA"
CASES = json.loads((SET_A / "cases.json").read_text())["cases"]
LAYERS = json.loads((SET_A / "cases.json").read_text())["layer_cases"]["layers"]


@cache
def expected(name):
    return vectors.VectorSet.open(SET_A).expected(name)


def run_case(llm, set_a, case, most_chunks=1000):
    """Logits at the case's positions, fed exactly as the case was, unless that takes too many calls: then in one go."""
    run, chunks = llm.mtp_logits if case["kind"].startswith("mtp") else llm.logits, set_a.chunks(case)
    return run(set_a.token_ids(case), chunks if len(chunks) <= most_chunks else None)[case["positions"]]


def assert_block(output, layer_idx, numerics):
    """What a block gave for the recorded input is within the limits of its numerics."""
    is_exact, table = numerics == "exact", expected("layers")
    rows, tag = table["positions"], f"{'pure' if is_exact else 'quant'}.{layer_idx}"
    for name in ("attn_out", "ffn_out", "streams"):
        want = table[f"{tag}.{name}"]
        reference = want.double() - table["input"].double()[rows] if name == "streams" else None
        limit = vectors.PURE_LAYER_RELATIVE if is_exact else vectors.STRICT_LAYER[name]
        assert vectors.relative_l2(getattr(output, name)[rows].cpu(), want, reference) <= limit, name
    assert torch.equal(output.experts.cpu(), table[f"{tag}.experts"].long())
    if output.entries is not None:
        missed = vectors.entries_missed(output.entries.cpu(), table[f"{tag}.entries"])
        assert missed <= (0 if is_exact else vectors.STRICT_LAYER["entries"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_exact_logits(exact_llm, set_a, case):
    logits = run_case(exact_llm, set_a, case)
    assert vectors.pure_deviation(logits, expected("expected_pure")[case["logits"]]) <= vectors.PURE_LOGITS_ABS


@pytest.fixture(scope="module")
def official_logits(official_llm, set_a):
    """Two cases have 45 and 299 steps of one token. Bits of `official` do not depend on how tokens are fed: see
    test_reproducibility.py, and `exact` above feeds them one by one.
    """
    return {case["id"]: run_case(official_llm, set_a, case, most_chunks=40) for case in CASES}


def test_official_logits(official_logits):
    """Every case on its own, then all rows together."""
    table = expected("expected_quant")
    failures = {}
    columns = ([], [], [], [])
    for case in CASES:
        name = case["id"]
        row = (
            official_logits[name],
            table[case["logits"]],
            table[f"{name}.noise_maxabs"],
            table[f"{name}.noise_cosdist"],
        )
        failures[name] = vectors.quantised_failures(*row)
        for column, part in zip(columns, row, strict=True):
            column.append(part)
    failures["all rows"] = vectors.quantised_failures(*(torch.cat(column) for column in columns))
    assert {name: found for name, found in failures.items() if found} == {}


@pytest.mark.parametrize("numerics", ["exact", "official"])
@pytest.mark.parametrize("layer_idx", LAYERS)
def test_single_blocks(numerics, layer_idx, request, set_a):
    """One block on a given input: this, not the logits, proves that every quantisation point is in its place."""
    llm = request.getfixturevalue(f"{numerics}_llm")
    output = llm.layer(layer_idx, expected("layers")["input"], expected("layers")["tokens"].tolist())
    assert_block(output, layer_idx, numerics)


def test_exact_trace(exact_llm, set_a):
    """Streams of every layer, experts, and picked entries of a 300-token prefill."""
    table = expected("trace_pure")
    case = {"seq": set_a.cases["trace"]["seq"], "n": set_a.cases["trace"]["n"]}
    layers = exact_llm.trace(set_a.token_ids(case))
    for layer_idx, output in enumerate(layers):
        rows = table["positions.streams"]
        assert vectors.relative_l2(output.streams[rows], table[f"streams.{layer_idx}"]) <= vectors.PURE_LAYER_RELATIVE
        assert torch.equal(output.experts, table[f"router.{layer_idx}.experts"].long())
        if output.entries is not None:
            assert torch.equal(output.entries, table[f"indexer.{layer_idx}.entries"].long())


def test_official_trace(official_llm, set_a):
    """Routers choose as published except within the noise the set records; entries within theirs."""
    table, trace = expected("trace_quant"), set_a.cases["trace"]
    layers = official_llm.trace(set_a.token_ids({"seq": trace["seq"], "n": trace["n"]}))
    for layer_idx, output in enumerate(layers):
        changed = (output.experts != table[f"router.{layer_idx}.experts"].long()).any(-1).double().mean()
        assert changed <= 2 * trace["natural_router_changes"][layer_idx]
        if output.entries is not None:
            missed = vectors.entries_missed(output.entries, table[f"indexer.{layer_idx}.entries"])
            assert missed <= 1.25 * trace["natural_indexer_miss"][str(layer_idx)]


def test_vectors_are_the_published_files(set_a):
    """A shard that was changed would make every other test here meaningless."""
    for name, facts in set_a.cases["files"].items():
        assert hashlib.sha256((SET_A / name).read_bytes()).hexdigest() == facts["sha256"], name


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
