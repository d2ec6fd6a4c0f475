"""The miniature: recorded greedy texts, requests alone against requests in a batch, chunks; and recorded vectors."""

from collections.abc import Iterator

import torch

from dsv4.config import EngineConfig
from dsv4.formats.tensors import QuantFormat, QuantTensor
from dsv4.llm import LLM
from dsv4.ops import Backend
from dsv4.request import SamplingParams
from dsv4.testing.agreement import Measure
from dsv4.testing.numeric import KERNEL_LIMITS, NEAR_TIE_NATS, bits_of
from dsv4.testing.shipped_data import golden_texts, op_vectors
from dsv4.testing.vectors import relative_l2
from dsv4.tools.selftest.report import Check, tried

MODEL = "flash-mini"
LIMITS = EngineConfig(max_context_tokens=256, max_concurrent_requests=12, prefix_cache_bytes=0)
_CPU_TEXTS = 4  # an oracle takes its time
_CHUNKS = (5, 1, 17)


def check_model(device: torch.device, backend: Backend | None) -> Iterator[Check]:
    """Loads the miniature on the device, with its usual backend unless one is given."""
    made: list[LLM] = []

    def load() -> list[Measure]:
        made.append(LLM(MODEL, device=device, engine=LIMITS, backend=backend, ignore_selftest=True))
        return []

    yield tried("text", f"load {MODEL}", load)
    if not made:
        return
    llm = made[0]
    num_texts = None if device.type == "cuda" else _CPU_TEXTS
    yield tried("text", "recorded greedy texts", lambda: _greedy(llm, num_texts))
    yield tried("requests", "alone against together", lambda: _alone_and_together(llm, num_texts))
    yield tried("requests", "chunks against one go", lambda: _chunks(llm))


def check_vectors(device: torch.device, backend: Backend) -> Iterator[Check]:
    """The linear layers of recorded operations, by the backend's op."""
    for name in ("linear_fp8", "linear_mxfp4", "linear_nvfp4"):
        yield tried("vectors", name, lambda name=name: _linear(name, device, backend), op="linear")  # type: ignore[misc]


def _greedy(llm: LLM, num_texts: int | None) -> list[Measure]:
    """How much a recorded token lacks to the best here, beyond what its recorded lead forgives (`assert_greedy`)."""
    measures = []
    for row in golden_texts(MODEL, "official")[:num_texts]:
        prompt, token_ids = llm.encode(row["prompt"]), row["token_ids"]
        logits = llm.logits([*prompt, *token_ids[:-1]])[len(prompt) - 1 :].double().cpu()
        lacking = logits.amax(-1) - logits.gather(-1, torch.tensor(token_ids).unsqueeze(-1)).squeeze(-1)
        forgiven = (NEAR_TIE_NATS - torch.tensor(row["gaps"], dtype=torch.float64)).clamp_min(0)
        excess = (lacking - forgiven).max().item()
        measures.append(Measure(f"{row['prompt']!r}: nats a token lacks beyond what is forgiven", excess, 0.0))
    return measures


def _alone_and_together(llm: LLM, num_texts: int | None) -> list[Measure]:
    prompts = [row["prompt"] for row in golden_texts(MODEL, "official")[:num_texts]]
    params = [
        SamplingParams(max_tokens=8, temperature=0.8 * (index % 2), seed=index, logprobs=1)
        for index in range(len(prompts))
    ]
    together = llm.generate(prompts, params)
    alone = [llm.generate(prompt, one)[0] for prompt, one in zip(prompts, params, strict=True)]
    different = sum(
        one.token_ids != other.token_ids or one.logprobs != other.logprobs
        for one, other in zip(together, alone, strict=True)
    )
    return [Measure("requests whose tokens or log-probabilities differ", float(different), 0.0)]


def _chunks(llm: LLM) -> list[Measure]:
    ids = llm.encode(" ".join(row["prompt"] for row in golden_texts(MODEL, "official")))[:64]
    pieces = [*_CHUNKS, len(ids) - sum(_CHUNKS)]
    whole, cut = llm.logits(ids), llm.logits(ids, pieces)
    return [Measure("logits that differ in a bit", float((bits_of(whole) != bits_of(cut)).sum()), 0.0)]


def _linear(name: str, device: torch.device, backend: Backend) -> list[Measure]:
    case = {key: value.to(device) for key, value in op_vectors(name).items()}
    if name == "linear_fp8":
        weight = QuantTensor(case["weight"], case["scale"].view(torch.uint8), QuantFormat.FP8_BLOCK)
    elif name == "linear_mxfp4":
        weight = QuantTensor(case["weight"].view(torch.uint8), case["scale"].view(torch.uint8), QuantFormat.MXFP4)
    else:
        weight = QuantTensor(case["weight"], case["weight_scale"], QuantFormat.NVFP4, case["weight_scale_2"])
    found = backend.ops.linear(case["x"], weight)
    return [Measure("relative error", relative_l2(found, case["y"]), KERNEL_LIMITS["bf16"].whole)]
