"""A model at its own shapes: each op against its oracle on what the model gives it, rows alone against rows in a batch,
and a prompt in one go against the same prompt token by token, in chunks, and beside another request.
"""

import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dsv4.config import BLOCK_TOKENS, ModelConfig
from dsv4.config.layers import build_schedule
from dsv4.engine.offload.pool import LayerExperts
from dsv4.engine.run.kernel_record import KernelVerdict, model_key, read_verdict, refuse, write_verdict
from dsv4.engine.step.sampler import SCORED_ROWS
from dsv4.formats.trees import tensors_of
from dsv4.llm import LLM
from dsv4.model.transformer import Transformer
from dsv4.ops import TORCH, Backend
from dsv4.testing.agreement import Measure
from dsv4.testing.model_cuts import Cut, CutModel, compile_models, random_cuts
from dsv4.testing.op_call import OpCall, implementations
from dsv4.testing.random_shapes import RandomModel
from dsv4.tools.plan.targets import resolve_target
from dsv4.tools.selftest.ops import Done, checks_of
from dsv4.tools.selftest.report import Check, Status, tried

TOKENS, SHORT_TOKENS, INTERPRETED_TOKENS = 400, 160, 16  # of the prompt
SIZES, SHORT_SIZES, INTERPRETED_SIZES = (300, 100, 48, 17, 6, 1), (48, 1), (3, 1)  # of calls whose ops are compared
_ALIGNED_TOKENS = 16 * BLOCK_TOKENS
CUTS = {"tokens": "token by token", "chunks": "in chunks", "batch": "beside another request"}


def check_shapes_of(folder: Path, device: torch.device, backend: Backend, progress: Done) -> Iterator[Check]:
    """Of a checkpoint: one layer of each kind with random weights in its formats. Without a GPU the ops of short calls
    are interpreted, and the prompt is cut on the oracles."""
    target, is_gpu = resolve_target(str(folder)), device.type == "cuda"
    shape = RandomModel(one_of_each_kind(target.config), target.experts)
    model = CutModel.random(shape, TOKENS if is_gpu else INTERPRETED_TOKENS, backend, device)
    if is_gpu:
        compile_models([model], lambda done, total: progress("compiling kernels", done, total))
    yield from check_ops_of(model, SIZES if is_gpu else INTERPRETED_SIZES, progress)
    if not is_gpu and backend.has_kernels:
        model = CutModel.random(shape, INTERPRETED_TOKENS, TORCH, device)
    yield from check_cuts(model)


def one_of_each_kind(config: ModelConfig) -> ModelConfig:
    """The same widths with one layer for each kind of attention and of router."""
    kinds = {(layer.router, layer.attention): layer.layer_idx for layer in build_schedule(config, with_mtp=False)}
    kept = sorted(kinds.values(), key=lambda layer_idx: layer_idx >= config.num_hash_layers)
    return replace(
        config, num_hidden_layers=len(kept), compress_ratios=tuple(config.layer_ratios[one] for one in kept),
        num_hash_layers=sum(one < config.num_hash_layers for one in kept), num_nextn_predict_layers=0, dspark=None,
    )  # fmt: skip


def check_ops_of(model: CutModel, sizes: Sequence[int], progress: Done) -> Iterator[Check]:
    """The arguments that calls of this many tokens give every op; of layers alike the first."""
    backend, seen = model.model.context.backend, set[Any]()
    found: list[Check] = []
    name = ""

    def watched(op_name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        if op_name not in implementations():
            return op
        parameters = inspect.signature(implementations()[op_name][0]).parameters

        def call(*arguments: Any, **options: Any) -> Any:
            given = dict(zip(parameters, arguments, strict=False)) | options
            is_offloaded = any(isinstance(value, LayerExperts) for value in given.values())  # the cuts have them
            facts = [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors_of(tuple(given.values()))]
            key = (op_name, *facts)
            if key not in seen and not is_offloaded:
                seen.add(key)
                found.extend(checks_of(OpCall(op_name, given), f"{op_name} {name}", backend))
            return op(*arguments, **options)

        return call

    for number, size in enumerate(sizes):
        name = f"in a call of {size} tokens" if size > 1 else "of one token for each of two requests"
        progress(f"ops {name}", number, len(sizes))
        slots = [model.cache.admit(len(model.token_ids)) for _ in range(2)]
        ids = model.token_ids[:-1]
        with torch.no_grad():
            if size == 1:
                model.model.forward(model.cache.make_batch(slots, [ids, ids[:-1]]), model.cache.handle)
                batch = model.cache.make_batch(slots, [[ids[0]], [ids[0]]])
            else:
                batch = model.cache.make_batch(slots[:1], [ids[:size]])
            with model.watching(watched):
                model.model.logits(model.model.forward(batch, model.cache.handle)[: model.head_rows])
        for slot in slots:
            model.cache.release(slot)
        yield from found
        found.clear()


def check_cuts(model: CutModel) -> Iterator[Check]:
    num_tokens = len(model.token_ids)

    def compare(cut: Cut) -> list[Measure]:
        count = len(model.differing_rows(cut))
        what = f"of {num_tokens} rows differ" + (f", the first op {model.first_difference(cut)}" if count else "")
        return [Measure(what, float(count), 0.0)]

    for name, cut in random_cuts(num_tokens, 0).items():
        yield tried("requests", f"{num_tokens} tokens in one go and {CUTS[name]}", lambda cut=cut: compare(cut))  # type: ignore[misc]


# ---- before a model is served ----


def check_once(llm: LLM, *, is_ignored: bool) -> str | None:
    """A short form, on the loaded weights, unless there is a verdict for this checkpoint's shapes; what to tell of it.
    `KernelRefused` where something is wrong. Nothing without kernels, without a checkpoint, and on several ranks."""
    model = llm.model
    if is_ignored or not isinstance(model, Transformer) or llm.checkpoint is None or not has_compiled_kernels(model):
        return None
    key = model_key(llm.cache.device, llm.config, llm.checkpoint.tensors.values())
    if read_verdict(key) is not None:  # a red one was refused when the model was loaded
        return None
    began = time.perf_counter()
    checks = short_checks(model, llm.cache.limits.max_context_tokens)
    keep_verdict(checks, key)
    refuse(verdict_of(checks, key))
    return summary(checks, time.perf_counter() - began)


def short_checks(model: Transformer, max_context_tokens: int) -> list[Check]:
    """Of a model whose kernels are compiled for a cache of this context. The cache here is small and has strides that
    16 divides where those do: kernels are compiled apart for others, and each would take seconds of the start."""
    context = max_context_tokens % _ALIGNED_TOKENS
    if context < SHORT_TOKENS:
        context = min(context + _ALIGNED_TOKENS, model.config.max_position_embeddings)
    small = CutModel(model, SHORT_TOKENS, head_rows=SCORED_ROWS[-1], max_context_tokens=context)
    return [*check_ops_of(small, SHORT_SIZES, lambda what, done, total: None), *check_cuts(small)]


def summary(checks: Sequence[Check], seconds: float) -> str:
    """One line: how many are right, and what was not checked."""
    counts = Counter(check.status for check in checks)
    said = f"{counts[Status.OK]} checks of the kernels at this model's shapes are right ({seconds:.1f} s)"
    missing = verdict_of(checks, {}).missing
    if missing:
        said += f"; kernels of {', '.join(missing)} cannot run here: their oracles serve from the next start on"
    if counts[Status.LEFT_OUT]:
        said += f"; {counts[Status.LEFT_OUT]} were left out for want of memory: the next start checks again"
    return said


def has_compiled_kernels(model: Transformer) -> bool:
    return model.context.backend.has_kernels and model.weights.embed.is_cuda


def keep_verdict(checks: Sequence[Check], key: dict[str, str]) -> None:
    """For the engine. Of one model what was left out is not known to be right: only a red verdict is kept then."""
    verdict, is_whole = verdict_of(checks, key), not any(check.status is Status.LEFT_OUT for check in checks)
    if verdict.failed or is_whole or "model" not in key:
        write_verdict(verdict)


def verdict_of(checks: Sequence[Check], key: dict[str, str]) -> KernelVerdict:
    failed = [check for check in checks if check.status is Status.FAILED]
    blamed = dict.fromkeys(check.op or f"{check.name}: {check.detail}" for check in failed)
    missing = {check.op for check in checks if check.status is Status.CANNOT_RUN}
    return KernelVerdict(key, tuple(blamed), tuple(sorted(missing)))
