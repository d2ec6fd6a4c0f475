"""`LLM`: the offline API. Load a checkpoint, generate, look inside.

    llm = LLM("path/to/checkpoint")  # or LLM(): the miniature that ships with the package
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=64, seed=1))[0].text)
    print(llm.chat([{"role": "user", "content": "Who are you?"}])[0].text)

Not a server (see `dsv4 serve`). Everything here runs on a machine without a GPU.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.schema import build_cache_schema
from dsv4.config import EngineConfig, ModelConfig
from dsv4.config.layers import LayerSpec
from dsv4.dist.shares import check_ranks, expert_range, rank_folder, rank_limits
from dsv4.dist.world import World, join_world
from dsv4.engine.control import EngineControl
from dsv4.engine.draft.options import Drafts, check_drafts, draft_limits
from dsv4.engine.engine import Engine
from dsv4.engine.fingerprint import Identity, identify, run_fingerprint, weights_digest
from dsv4.engine.link.stream import TokenEvent
from dsv4.engine.offload.load import OffloadExperts, check_offload
from dsv4.engine.offload.pool import ExpertPool
from dsv4.engine.ranks.load import Share, check_alike, failing_together, rank_device
from dsv4.engine.ranks.start import take_place
from dsv4.engine.request import Request
from dsv4.engine.run.kernel_record import allowed_backend
from dsv4.engine.run.start import Start, set_threads
from dsv4.engine.serving import Serving
from dsv4.engine.step.constraint import Constraint
from dsv4.engine.step.tokens import StepTokens
from dsv4.engine.verbs import Controls
from dsv4.llm_input import (
    Numerics,
    Prompt,
    as_params,
    as_prompts,
    check_device,
    check_numerics,
    check_widths,
    limits_for,
    naming_what_does_not_fit,
    planned_cache_bytes,
)
from dsv4.llm_inside import Inside
from dsv4.llm_outputs import EventOutput, answer_progress, check_last
from dsv4.llm_start import cache_schedule, compile_ahead, make_runner, warm_up, with_chunk
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.progress import Progress
from dsv4.loader.shipped import find_checkpoint
from dsv4.model.parameters import ModelParams
from dsv4.model.prepare import backend_for_weights, prepare_params
from dsv4.model.transformer import Transformer
from dsv4.ops import Backend, backend_for
from dsv4.ops.shapes import check_shapes
from dsv4.request import Completion, FinishReason, RequestError, SamplingParams, TokenLogprobs
from dsv4.text.chat import ChatOptions, effort_profile
from dsv4.text.output import TextOutput
from dsv4.text.tokenizer import Tokenizer, encode_chat

__all__ = ["LLM", "Numerics", "Prompt"]
_LOG = logging.getLogger("dsv4.engine")


class LLM(Inside, Controls):
    """A DeepSeek-V4 model, its cache and its tokenizer.

    path      a checkpoint folder (official FP8 + MXFP4, Base, NVFP4, BF16; official or Hugging Face names), or the name
              of a shipped one; without a path, the miniature that ships with the package
    device    "cpu" or "cuda"
    numerics  "official": every quantisation point of the published inference code, bf16 activations.
              "exact": weights dequantised, nothing else quantised, in `dtype` (fp32 by default)
    engine    limits; by default 8 requests of the model's context, at most 16,384 tokens. A chunk that they leave open
              is chosen for a GPU by measured speed and its memory; on a CPU, or beside offloaded experts, it is 2,048
    backend   `TORCH`, `TRITON` or one made of them (ops/backend.py); by default the kernels on a GPU in `official`
              numerics, the oracles elsewhere
    offload_experts
              for a model larger than the GPU: routed experts live in host memory and are copied to the GPU when a layer
              chooses them. "auto" (or True) keeps as many on the GPU as fit, by the arithmetic of `dsv4 plan`, all of
              them if they do; a number keeps that many of each layer. None (or False) keeps all. The same bits anyway.
              With several ranks: of each rank's own experts
    drafts    how many tokens a request may be ahead of itself: a step verifies drafts of the checkpoint's MTP block or
              DSpark head, and keeps those that are what would have been drawn anyway. "auto" chooses by measured times
              and acceptance, a number is always asked for, "off" is the default. Tokens and log-probabilities are those
              of "off", bit for bit. Needs official numerics
    gpus      ranks that share the model, a process and a device each; experts and requests are divided among them, and
              the bits are those of one. On a CPU they are processes beside this one. Limits are of all ranks together,
              `num_blocks` and `max_chunk_tokens` of each. Under torchrun: as many as it started; the constructor then
              returns on rank 0 alone, elsewhere it serves until rank 0 ends, and exits
    check_exchange
              with several ranks: what they send one another carries checksums; slower
    progress  show a progress bar while loading
    ignore_selftest
              use kernels although `dsv4 selftest` found them wrong on this GPU

    With the kernels, loading ends with a warm-up: everything is compiled, and decode steps are captured as graphs.
    On a CPU, loading a small model sets torch to one thread (`engine/run/start.py`), unless OMP_NUM_THREADS is set.
    Requests of `generate` and of open streams, of any thread, share one engine, one cache and the engine's steps.
    """

    _end_ranks: weakref.finalize[[], LLM] | None = None

    def __init__(
        self, path: str | Path | None = None, *, device: str | torch.device = "cpu", numerics: Numerics = "official",
        dtype: torch.dtype | None = None, engine: EngineConfig | None = None, backend: Backend | None = None,
        offload_experts: OffloadExperts = None, drafts: Drafts = "off", gpus: int = 1, check_exchange: bool = False,
        progress: bool = False, ignore_selftest: bool = False,
    ) -> None:  # fmt: skip
        compute_dtype, chosen_device, start = check_numerics(numerics, dtype), check_device(device), Start(progress)
        folder = find_checkpoint(path)
        config = ModelConfig.from_pretrained(folder)
        exact_dtype = compute_dtype if numerics == "exact" else None
        # limits and tokenizer come before the weights: what can fail at once should
        num_ranks = check_ranks(gpus, config.n_routed_experts)
        check_offload(offload_experts, config, num_ranks)
        drafts = check_drafts(drafts, config, numerics=numerics)
        wanted = draft_limits(limits_for(config, engine, exact_dtype), config, drafts)
        chosen_device = rank_device(chosen_device, num_ranks)
        if backend is not None and num_ranks > 1:
            raise RequestError("backend needs gpus=1: each of several ranks takes the one of its device")
        tokenizer = Tokenizer.from_pretrained(folder) if (folder / "tokenizer.json").exists() else None
        checkpoint = Checkpoint.open(folder)
        chosen_backend = backend or allowed_backend(
            backend_for(chosen_device, numerics), chosen_device, config, checkpoint.tensors.values(),
            is_ignored=ignore_selftest,
        )  # fmt: skip
        if chosen_backend.has_kernels:
            check_shapes(config)
        wanted = with_chunk(
            wanted, config, chosen_device, chosen_backend, exact_dtype, checkpoint, offloads=bool(offload_experts),
            num_ranks=num_ranks,
        )  # fmt: skip
        limits = rank_limits(wanted, num_ranks)
        world: World | None = None
        if num_ranks > 1:
            settings = {
                "path": str(folder), "device": chosen_device.type, "numerics": numerics, "gpus": num_ranks,
                "engine": asdict(wanted), "dtype": str(compute_dtype).removeprefix("torch."),
                "check_exchange": check_exchange, "offload_experts": offload_experts,
                "num_threads": torch.get_num_threads(), "ignore_selftest": ignore_selftest, "drafts": drafts,
            }  # fmt: skip
            world = join_world(num_ranks, chosen_device, settings, is_checked=check_exchange)
        with failing_together(world):
            if world is not None:
                identity = identify(
                    weights_digest(checkpoint, config), numerics=numerics, dtype=compute_dtype,
                    backend=chosen_backend.name, device=chosen_device,
                )  # fmt: skip
                check_alike(world, identity)
                limits = rank_folder(limits, world.rank)
            share = Share(checkpoint, config, world, chosen_device, exact_dtype)
            cache_bytes = planned_cache_bytes(config, limits, exact_dtype)
            placement = share.placement(offload_experts, wanted, limits, cache_bytes)
            if world is None and placement is None:
                compile_ahead(
                    start, checkpoint, config, limits, chosen_backend, drafts, compute_dtype, exact_dtype, chosen_device
                )  # fmt: skip
            helps = "fewer" if placement else "offload"
            with naming_what_does_not_fit("weights", limits, helps), start.phase("read"):
                params, pool = share.load(placement, chosen_backend, progress)
            self._set_up(
                config, params, numerics, compute_dtype, limits, tokenizer, chosen_backend, pool, checkpoint, world,
                drafts, start=start,
            )  # fmt: skip

    @classmethod
    def from_params(
        cls, config: ModelConfig, params: ModelParams, *, numerics: Numerics = "official",
        dtype: torch.dtype | None = None, engine: EngineConfig | None = None, tokenizer: Tokenizer | None = None,
        backend: Backend | None = None, pool: ExpertPool | None = None, drafts: Drafts = "off", fingerprint: str = "",
    ) -> LLM:  # fmt: skip
        """Over parameters already in memory (for `exact`, plain tensors of `dtype`), on the device they are on.

        pool: holds the experts of `params`, where they are offloaded (engine/offload/pool.py); it brings its backend.
        fingerprint: a name for all that decides the bits of a row, for `EngineConfig.cache_dir`; a checkpoint has one.
        """
        llm = cls.__new__(cls)
        compute_dtype = check_numerics(numerics, dtype)
        drafts = check_drafts(drafts, config, numerics=numerics)
        exact_dtype = compute_dtype if numerics == "exact" else None
        limits = draft_limits(limits_for(config, engine, exact_dtype), config, drafts)
        if pool is not None:
            backend = pool.inner
        chosen_backend = backend or backend_for(params.embed.device, numerics)
        if chosen_backend.has_kernels:
            check_shapes(config)
        limits = with_chunk(limits, config, params.embed.device, chosen_backend, exact_dtype, offloads=pool is not None)
        llm._set_up(
            config, params, numerics, compute_dtype, limits, tokenizer, chosen_backend, pool, drafts=drafts,
            fingerprint=fingerprint,
        )  # fmt: skip
        return llm

    def _set_up(
        self, config: ModelConfig, params: ModelParams, numerics: Numerics, dtype: torch.dtype,
        limits: EngineConfig, tokenizer: Tokenizer | None, backend: Backend, pool: ExpertPool | None,
        checkpoint: Checkpoint | None = None, world: World | None = None, drafts: Drafts = "off",
        fingerprint: str = "", start: Start | None = None,
    ) -> None:  # fmt: skip
        start = start or Start()
        if numerics == "official":
            check_widths(config, params)
        if params.embed.device.type == "cpu":
            set_threads(config)
        self.config = config
        self.numerics = numerics
        self.tokenizer = tokenizer
        self._outputs: dict[Request, TextOutput] = {}  # of the requests that run
        self._lock = threading.RLock()  # of the engine: several threads' requests share its steps
        self.pool = pool
        self.checkpoint = checkpoint
        self.weights_digest = weights_digest(checkpoint, config)  # as loaded: what becomes of the files is not theirs
        self.num_ranks = 1 if world is None else world.size
        self.own_experts = expert_range(config.n_routed_experts, self.num_ranks, 0 if world is None else world.rank)
        self._set_up_control(EngineControl(weakref.proxy(self), backend))
        with start.phase("prepare"):
            params = prepare_params(params, backend)
        backend = backend_for_weights(backend, params, has_drafts=limits.max_draft_tokens > 0)
        exchange = None if world is None else world.exchange(config, limits, params.embed.device, dtype)
        self.model = Transformer(config, params, dtype, backend=pool.backend if pool else backend, exchange=exchange)
        schedule = cache_schedule(config, params, limits)
        with start.phase("cache"), naming_what_does_not_fit("cache", limits):
            self.cache = self._make_cache(limits, schedule, fingerprint or self._fingerprint(limits, schedule))
        can_capture = backend.can_capture(params.embed.device)
        if backend.has_kernels and params.embed.is_cuda and backend.waiting_ops:
            names = ", ".join(backend.waiting_ops)
            _LOG.warning("no CUDA graphs, and kernels compile at their first use: the host waits in %s", names)
        uses_graphs = can_capture and (exchange is None or exchange.can_capture)
        runner, choice = make_runner(self.model, self.cache, limits, drafts, use_graphs=uses_graphs, experts=pool)
        if can_capture:
            warm_up(start, runner, choice, limits, world)
        self.start_seconds = start.seconds
        _LOG.info("loaded in %s", start.text)
        self.engine: Serving
        if world is None:
            self.engine = Engine(self.model, self.cache, runner=runner, experts=pool, drafts=choice)
        else:
            self.engine = take_place(self, world, runner, choice, backend)
            self._end_ranks = weakref.finalize(self, world.close)

    def identity(self) -> Identity:
        """What, besides a request, decides its tokens and bits: checkpoint, numerics, kernels, processor."""
        context, device = self.model.context, self.model.weights.embed.device
        named = {"numerics": self.numerics, "backend": context.backend.name}
        return identify(self.weights_digest, **named, dtype=context.dtype, device=device)

    def _fingerprint(self, limits: EngineConfig, schedule: Sequence[LayerSpec]) -> str:
        """Whose rows the files of `cache_dir` are; empty where nothing outlives this process."""
        if limits.cache_dir is None or self.checkpoint is None:
            return ""
        itemsize = self.model.context.dtype.itemsize if self.numerics == "exact" else None
        schema = build_cache_schema(self.config, schedule, limits, plain_itemsize=itemsize)
        return run_fingerprint(self.identity(), self.config, schema)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish the prefix cache's files, end the other ranks where there are any. Leaving the process does it too."""
        if self._end_ranks is not None:
            self._end_ranks()
        self.cache.close()

    def _make_cache(
        self, limits: EngineConfig, schedule: Sequence[LayerSpec], fingerprint: str = ""
    ) -> KVCacheManager:  # fmt: skip
        model = self.model
        return KVCacheManager(
            self.config, schedule, limits, device=model.weights.embed.device,
            plain_dtype=model.context.dtype if self.numerics == "exact" else None, fingerprint=fingerprint,
        )  # fmt: skip

    # ---- generation ----

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None, *,
        progress: Progress = False,
    ) -> list[Completion]:  # fmt: skip
        """Continue each prompt (text or token ids) under one SamplingParams, or one each. Results in order; the `n`
        answers to a prompt stand side by side.

        One prompt, as a string or as a flat list of ids, is a list of one.
        progress  a bar on stderr, or a function of answers done and answers in all
        """
        many = as_prompts(prompts)
        pairs = [(self.encode(prompt), one) for prompt, one in zip(many, as_params(params, len(many)), strict=True)]
        with self._lock:
            prepared = [self._prepare(prompt, own) for prompt, one in pairs for own in one.answers()]
            for request, output in prepared:
                self._submit(request, output)
        try:
            with answer_progress(progress, [output for _, output in prepared]) as look:
                while not all(output.is_done for _, output in prepared):
                    self.step()
                    look()
        finally:
            for request, _ in prepared:
                self.abort(request)
        return [output.completion() for _, output in prepared]

    def chat(
        self, messages: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None = None, *,
        progress: Progress = False, **options: Any,
    ) -> list[Completion]:  # fmt: skip
        """Answer a conversation (a list of messages), or each of several, as `generate` does. `options` are the fields
        of `dsv4.text.chat.ChatOptions`: thinking, tools, ... The text is all the model writes: thoughts, `</think>` and
        calls included (`dsv4.text.parse.parse_completion` takes them apart).
        """
        if self.tokenizer is None:
            raise RequestError("this checkpoint has no tokenizer.json, and chat() needs one; use generate()")
        chosen = ChatOptions(**{"profile": effort_profile(self.config), **options})
        conversations = messages if messages and isinstance(messages[0], (list, tuple)) else [messages]
        return self.generate(
            [encode_chat(self.tokenizer, check_last(one), chosen) for one in conversations], params, progress=progress
        )

    def start(
        self, prompt: Prompt, params: SamplingParams | None = None, constraint: Constraint | None = None
    ) -> tuple[Request, TextOutput]:  # fmt: skip
        """Queue one request; call `step` until its output is done, or `abort` it. `generate` and `stream` do that."""
        with self._lock:
            request, output = self._prepare(self.encode(prompt), as_params(params, 1)[0], constraint)
            self._submit(request, output)
        return request, output

    def step(self) -> None:
        """One step of the engine, for all requests that run, whoever started them. Several threads may take turns.
        While the engine is paused, it waits until another thread goes on."""
        with self._lock:
            self._wait_while_paused()
            try:
                tokens = self.engine.step() if self.engine.has_work else StepTokens()
            except BaseException:
                self._deliver(self.engine.take_results())
                raise
            self._deliver(tokens)

    def abort(self, request: Request) -> None:
        """End a request that `start` queued and free what it holds; one that is over is left as it is."""
        with self._lock:
            self.engine.abort(request)
            self._outputs.pop(request, None)

    def _prepare(
        self, prompt: Sequence[int], params: SamplingParams, constraint: Constraint | None = None
    ) -> tuple[Request, TextOutput]:  # fmt: skip
        if params.stop and self.tokenizer is None:
            message = "stop strings need a tokenizer, and this checkpoint has none; use stop_token_ids"
            raise RequestError(message, field="stop")
        request = self.engine.prepare(prompt, params, constraint)
        prompt_ids = request.token_ids[: request.prompt_len]
        return request, TextOutput(
            prompt_ids, request.params, eos_token_id=self.config.eos_token_id, tokenizer=self.tokenizer
        )  # fmt: skip

    def _submit(self, request: Request, output: TextOutput) -> None:
        self.engine.submit(request)
        self._outputs[request] = output

    def _deliver(self, tokens: StepTokens) -> None:
        """What a step drew becomes text; requests that are over are forgotten."""
        for part in tokens.rest:
            self._deliver(part)
        last = tokens.last_tokens()
        ended = [*tokens.ended]
        for place, (request, token_id) in enumerate(zip(tokens.requests, tokens.token_ids.tolist(), strict=True)):
            output = self._outputs.get(request)
            if output is not None and not output.is_done:
                output.take(token_id, tokens.logprobs.get(place), last.get(place))
                if output.finish_reason is not None and place not in last:
                    self.engine.finish(request)
                    ended.append(request)
        for request in ended:
            output = self._outputs.pop(request, None)
            if output is None:
                continue
            output.num_cached_tokens, output.replay = request.num_cached_tokens, request.replay
            output.prompt_logprobs = request.prompt_logprobs
            output.weight_versions = request.weight_versions
            if not output.is_done:
                output.error = request.problem()
                if output.error is None and request.finish_reason is not None:
                    output.end(request.finish_reason)

    def _end_all(self) -> int:
        """End what runs and waits, with what it has."""
        ended = tuple(self._outputs)
        for request in ended:
            self.engine.finish(request, FinishReason.ABORT)
        self._deliver(StepTokens(ended=ended))
        return len(ended)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Text as it comes: pieces that join to the completion's text, never half a character.

        The request starts with the first piece asked for; closing or dropping the iterator ends it. While a stream is
        open, `generate` and other streams carry it along.
        """
        if self.tokenizer is None:
            raise RequestError("this checkpoint has no tokenizer.json, so there is no text to stream; use generate()")
        return (event.text for event in self.stream_tokens(prompt, params) if event.text)

    def stream_tokens(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """As `stream`, each token with its id, its log-probabilities where they were asked for, and the text that
        became certain; the last has a `finish_reason`. One that only scores its prompt gives an event without token."""
        request, plain = self._prepare(self.encode(prompt), as_params(params, 1)[0])
        output = EventOutput(
            plain.prompt_ids, plain.params, eos_token_id=self.config.eos_token_id, tokenizer=self.tokenizer
        )
        return self._stream(request, output)

    def _stream(self, request: Request, output: EventOutput) -> Iterator[TokenEvent]:
        """Queues the request at the first `next`, so that a stream never read costs nothing."""
        with self._lock:
            self._submit(request, output)
        try:
            while not output.is_done or output.events:
                if output.events:
                    yield output.events.popleft()
                else:
                    self.step()
            completion = output.completion()  # raises if the request was dropped
            if not completion.token_ids:
                yield TokenEvent(0, None, "", None, completion.finish_reason, perf_counter())
        finally:
            self.abort(request)

    def score(self, text: Prompt | Sequence[Prompt], num_top: int = 0) -> list[tuple[TokenLogprobs | None, ...]]:
        """How likely each token of a text was after those before it, and the `num_top` likeliest there; None for the
        first. Bit for bit what generating the same tokens records (`SamplingParams.logprobs`).
        """
        params = SamplingParams(max_tokens=0, prompt_logprobs=num_top)
        scored = self.generate(text, params)
        return [completion.prompt_logprobs or () for completion in scored]

    def encode(self, prompt: Prompt) -> list[int]:
        """The ids of a text, without any marker added before or after it; ids as they are."""
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise RequestError("this checkpoint has no tokenizer.json; pass the prompt as a list of token ids")
        return self.tokenizer.encode(prompt)
