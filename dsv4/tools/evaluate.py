"""What the numerics do to a model on real text: perplexity of every mode, indexer recall, router agreement.

The text is cut into contexts, each evaluated as a prompt of its own, so every number rests on the same predictions.
Everything is compared with the `exact` numerics (weights dequantised, nothing else rounded).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.config import EngineConfig, IndexKeyFormat, ModelConfig
from dsv4.config.layers import LayerSpec, RouterKind, build_schedule
from dsv4.errors import Dsv4Error
from dsv4.llm import LLM, Numerics
from dsv4.model.block import BlockOutput

DEFAULT_MAX_TOKENS = 4096
DEFAULT_CONTEXT = 1024
DEFAULT_DECODE_TOKENS = 192

Advance = Callable[[str, int], None]  # what runs, tokens done since the last call


class EvaluationError(Dsv4Error, ValueError):
    """A text or a setting that cannot be evaluated."""


@dataclass(frozen=True)
class Mode:
    """One way to run the model. decode: token by token instead of one prefill per context."""

    name: str
    numerics: Numerics
    index_keys: IndexKeyFormat = "fp4"
    decode: bool = False


MODES = (
    Mode("exact", "exact"),
    Mode("official", "official"),
    Mode("official, FP8 index keys", "official", index_keys="fp8"),
)
DECODE_MODES = (Mode("prefill", "official"), Mode("decode", "official", decode=True))


@dataclass(frozen=True)
class ModeResult:
    """Perplexity over `predictions` next-token predictions; `seconds` of computing."""

    name: str
    perplexity: float
    predictions: int
    seconds: float


@dataclass(frozen=True)
class LayerAgreement:
    """One layer, official against exact numerics. None where the layer has no indexer or never had to choose.

    router          mean share of a token's experts that both chose
    index_recall    mean share of the exact picks that the official indexer picked too, over tokens that see more
                    entries than it may pick
    """

    layer_idx: int
    attention: str
    router: float
    index_recall: float | None


@dataclass(frozen=True)
class Evaluation:
    """Every number `dsv4 eval` prints. `decode` compares prefill and decode on a shorter stretch of the same text."""

    tokens: int
    contexts: int
    modes: tuple[ModeResult, ...]
    decode: tuple[ModeResult, ...]
    layers: tuple[LayerAgreement, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def cut_contexts(token_ids: Sequence[int], max_tokens: int, context: int) -> list[list[int]]:
    """The first `max_tokens` ids in pieces of `context`; a last piece of fewer than two tokens predicts nothing."""
    if max_tokens < 2 or context < 2:
        raise EvaluationError(f"max_tokens and context must be at least 2, found {max_tokens} and {context}")
    used = list(token_ids)[:max_tokens]
    pieces = [used[start : start + context] for start in range(0, len(used), context)]
    pieces = [piece for piece in pieces if len(piece) >= 2]
    if not pieces:
        raise EvaluationError(f"the text has {len(used)} tokens; at least 2 are needed")
    return pieces


def evaluate(
    path: str | Path, token_ids: Sequence[int], *, max_tokens: int = DEFAULT_MAX_TOKENS, context: int = DEFAULT_CONTEXT,
    decode_tokens: int = DEFAULT_DECODE_TOKENS, device: str = "cpu", advance: Advance = lambda mode, tokens: None,
) -> Evaluation:  # fmt: skip
    """Run every mode of the checkpoint at `path` over the same tokens.

    context is limited to the model's; decode_tokens 0 leaves the comparison of prefill and decode out. `advance` is
    called with progress; `total_tokens` says how much there will be.
    """
    config = ModelConfig.from_pretrained(path)
    _check_ids(token_ids, config.vocab_size)
    contexts = cut_contexts(token_ids, max_tokens, min(context, config.max_position_embeddings))
    stretch = contexts[0][:decode_tokens]
    results, traces = [], []
    for mode in MODES:
        llm = _load(path, mode, contexts, device)
        result, trace = _run_traced(llm, mode, contexts, advance)
        results.append(result)
        if mode in MODES[:2]:
            traces.append(trace)
    decode = []
    if len(stretch) >= 2:
        llm = _load(path, DECODE_MODES[0], contexts, device)
        decode = [_run_pieces(llm, mode, stretch, advance) for mode in DECODE_MODES]
    return Evaluation(
        tokens=sum(map(len, contexts)), contexts=len(contexts), modes=tuple(results), decode=tuple(decode),
        layers=tuple(_agreement(config, *traces)),
    )  # fmt: skip


def total_tokens(num_tokens: int, decode_tokens: int = DEFAULT_DECODE_TOKENS) -> int:
    """Tokens that `evaluate` will report to `advance` for a text of `num_tokens` (at most; for a progress bar)."""
    return len(MODES) * num_tokens + len(DECODE_MODES) * min(num_tokens, decode_tokens)


def _check_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise EvaluationError(
            f"token ids must be from 0 to {vocab_size - 1}, found {min(token_ids)} to {max(token_ids)}"
        )


def _load(path: str | Path, mode: Mode, contexts: list[list[int]], device: str) -> LLM:
    longest = max(map(len, contexts))
    engine = EngineConfig(
        max_context_tokens=longest, max_concurrent_requests=1, max_chunk_tokens=longest,
        index_key_format=mode.index_keys,
    )  # fmt: skip
    return LLM(path, device=device, numerics=mode.numerics, engine=engine)


Trace = list[list[tuple[Tensor, Tensor | None]]]  # per context, per layer: experts and picks


def _run_traced(llm: LLM, mode: Mode, contexts: list[list[int]], advance: Advance) -> tuple[ModeResult, Trace]:
    started = time.perf_counter()
    total, predictions = 0.0, 0
    trace: Trace = []
    for piece in contexts:
        layers: list[BlockOutput] = llm.trace(piece)
        logits = llm.model.logits(layers[-1].streams)
        total += negative_log_likelihood(logits, piece)
        predictions += len(piece) - 1
        trace.append([(layer.experts, layer.entries) for layer in layers])
        advance(mode.name, len(piece))
    seconds = time.perf_counter() - started
    return ModeResult(mode.name, math.exp(total / predictions), predictions, seconds), trace


def _run_pieces(llm: LLM, mode: Mode, token_ids: list[int], advance: Advance) -> ModeResult:
    started = time.perf_counter()
    logits = llm.logits(token_ids, [1] * len(token_ids) if mode.decode else None)
    advance(mode.name, len(token_ids))
    mean = negative_log_likelihood(logits, token_ids) / (len(token_ids) - 1)
    return ModeResult(mode.name, math.exp(mean), len(token_ids) - 1, time.perf_counter() - started)


def negative_log_likelihood(logits: Tensor, token_ids: Sequence[int]) -> float:
    """Sum over the tokens after the first, in nats: logits [len, vocab] of the same sequence."""
    targets = torch.tensor(list(token_ids)[1:], device=logits.device)
    log_probs = torch.log_softmax(logits[:-1].double(), -1)
    return -float(log_probs.gather(-1, targets.unsqueeze(-1)).sum())


def shared_share(first: Tensor, second: Tensor) -> Tensor:
    """[T, k] ids each (-1 = none, distinct within a row) -> share of each row of `first` that is also in `second`."""
    present = first >= 0
    found = ((first.unsqueeze(-1) == second.unsqueeze(-2)).any(-1) & present).sum(-1)
    return found.double() / present.sum(-1).clamp_min(1)


def index_recall(exact: Tensor | None, official: Tensor | None, layer: LayerSpec, index_topk: int) -> Tensor:
    """Picks [T, k] of one text -> share of the exact ones that the official indexer picked too, of each token that sees
    more entries than it may pick; nothing without an indexer."""
    if exact is None or official is None:
        return torch.zeros(0, dtype=torch.float64)
    seen = (torch.arange(len(exact), device=exact.device) + 1) // layer.ratio
    rows = (seen > index_topk).nonzero().squeeze(-1)
    return torch.cat([shared_share(exact[part], official[part]) for part in rows.split(64)])  # [64, k, k] at a time


def _agreement(config: ModelConfig, exact: Trace, official: Trace) -> list[LayerAgreement]:
    layers = []
    for layer in build_schedule(config):
        pairs = [(one[layer.layer_idx], other[layer.layer_idx]) for one, other in zip(exact, official, strict=True)]
        router = torch.cat([shared_share(experts, others) for (experts, _), (others, _) in pairs])
        recall = torch.cat([index_recall(picks, others, layer, config.index_topk) for (_, picks), (_, others) in pairs])
        assert layer.router is RouterKind.DENSE or float(router.min()) == 1.0, "a hash table is a table"
        mean = float(recall.mean()) if len(recall) else None
        layers.append(LayerAgreement(layer.layer_idx, layer.attention.value, float(router.mean()), mean))
    return layers
