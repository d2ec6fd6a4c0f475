"""The oracles are device-free: set A on a GPU, within the same limits as on a CPU."""

import pytest
import torch
from test_vectors import LAYERS, run_case

from dsv4 import LLM
from dsv4.ops import TORCH
from dsv4.testing.vectors import (
    PURE_LAYER_RELATIVE,
    PURE_LOGITS_ABS,
    STRICT_LAYER,
    pure_deviation,
    quantised_failures,
    relative_l2,
)

pytestmark = pytest.mark.gpu
CASE_IDS = ("p300", "d126_134", "mtp_p150")


@pytest.fixture(scope="module", params=["exact", "official"])
def llm(request, set_a):
    return LLM(set_a.model_path, device="cuda", numerics=request.param, backend=TORCH)


@pytest.mark.parametrize("case_id", CASE_IDS)
def test_logits(llm, set_a, case_id):
    case = next(case for case in set_a.cases["cases"] if case["id"] == case_id)
    logits = run_case(llm, set_a, case).cpu()
    if llm.numerics == "exact":
        assert pure_deviation(logits, set_a.expected("expected_pure")[case["logits"]]) <= PURE_LOGITS_ABS
    else:
        table = set_a.expected("expected_quant")
        noise = table[f"{case_id}.noise_maxabs"], table[f"{case_id}.noise_cosdist"]
        assert quantised_failures(logits, table[case["logits"]], *noise) == []


def test_single_blocks(llm, set_a):
    table, tag = set_a.expected("layers"), "pure" if llm.numerics == "exact" else "quant"
    for layer_idx in LAYERS:
        output = llm.layer(layer_idx, table["input"], table["tokens"].tolist())
        for name in ("attn_out", "ffn_out"):
            limit = PURE_LAYER_RELATIVE if llm.numerics == "exact" else STRICT_LAYER[name]
            found = getattr(output, name)[table["positions"]].cpu()
            assert relative_l2(found, table[f"{tag}.{layer_idx}.{name}"]) <= limit


def test_chunking_is_bitwise_the_same(set_a):
    """In `official` numerics; in `exact` a tie of index scores falls by the length of the row (see index_topk_ref)."""
    llm = LLM(set_a.model_path, device="cuda", backend=TORCH)
    token_ids = set_a.cases["sequences"]["t300"][:140]
    one_go = llm.logits(token_ids)
    assert torch.equal(llm.logits(token_ids, [1, 3, 60, 64, 12]), one_go)
