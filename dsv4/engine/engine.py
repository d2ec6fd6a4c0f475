"""`Engine`: runs many requests over one model and one cache, a step at a time.

A step is launched and collected. Launching: the `Scheduler` says which requests feed how many tokens, `StepBuilder`
makes that one batch, a `Runner` launches the forward call and the draw. Collecting: the host reads what was drawn,
tells each request, and lets go of those that are done. On a GPU a step is launched before the one before it is
collected, so the host works while the device does: the token a request has just drawn is fed from the device's memory,
and an end the host sees one step late costs one row whose result is dropped. No token depends on that: what a row
computes is a function of its own request. How requests wait, share and lose the cache: scheduler.py.

An engine that drafts feeds a decoding request its newest token and some drafts, draws from every row, and keeps the
draws up to the first that differs from its draft: those of an engine that does not draft. A step with drafts, or behind
which drafts are asked for, is collected before the next is planned: only its draws say where requests stand. The drafts
themselves are not waited for: the drafter runs while the host plans, and the next step reads them on the device.

One cache has one engine: two would promise the same blocks. Not for several threads at once.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from torch import Tensor

from dsv4.cache.errors import NoFreeSlot
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.schema import blocks_at_position
from dsv4.cache.transfer import HostCopy
from dsv4.engine.draft.counts import FixedDrafts, Offer
from dsv4.engine.gate import Gate
from dsv4.engine.offload.pool import ExpertPool, TransferStats
from dsv4.engine.request import UNREAD, Request
from dsv4.engine.run.in_flight import InFlightStep, read_offers
from dsv4.engine.run.runner import Runner
from dsv4.engine.run.step_wait import StepWait
from dsv4.engine.schedule.kept import Outcome, by_piece, num_accepted
from dsv4.engine.schedule.plan import Piece, StepPlan
from dsv4.engine.schedule.scheduler import Scheduler
from dsv4.engine.stats import SCHEDULER_COUNTS, EngineStats
from dsv4.engine.step.builder import StepBuilder
from dsv4.engine.step.constraint import Constraint
from dsv4.engine.step.masks import constraint_failure, make_masks
from dsv4.engine.step.replays import wants_picks
from dsv4.engine.step.sampler import Drawn, Undrawable, listed_logprobs
from dsv4.engine.step.size import Sizes, StepSize
from dsv4.engine.step.tokens import Results, StepTokens
from dsv4.engine.verify_hits import HitVerifier
from dsv4.model.transformer import Transformer
from dsv4.request import FinishReason, RequestError, SamplingParams, check_params, check_prompt

_FILE_SECONDS = 0.001  # that a step waits for files at most, where nothing can run without them


class Engine:
    """`add` requests, call `step` until `has_work` is false (or until those that matter are done).

    runner      computes the steps; by default directly, without graphs
    overlap     launch a step before the one before it is collected; by default on a GPU
    experts     the pool of a model whose experts are offloaded, for `stats` and `check_integrity`
    sizes       how large each step is, where other engines run in step with this one
    drafts      how many drafts the runner's drafter is asked for; None does not draft
    clock       seconds, for deadlines

    Each of `observers` is called with the experts that every step chose: int64 [layers, tokens, k] on the host. Append
    one, and remove the same one later; while the list is empty nothing is copied.
    """

    def __init__(
        self, model: Transformer, cache: KVCacheManager, *,
        runner: Runner | None = None, overlap: bool | None = None, clock: Callable[[], float] = time.monotonic,
        experts: ExpertPool | None = None, drafts: FixedDrafts | None = None, sizes: Sizes | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.cache = cache
        self.sizes = sizes or Sizes()
        self.scheduler = Scheduler(
            cache, num_blocks=cache.schema.num_blocks, max_batched_tokens=cache.limits.chunk_tokens,
            num_rows=0 if drafts is not None else cache.schema.num_slots,
        )  # fmt: skip
        self.runner = runner or Runner(model, cache, buckets=(), use_graphs=False, experts=experts)
        self.observers: list[Callable[[Tensor], None]] = []
        assert drafts is None or self.runner.drafting is not None, "drafts need a runner with a drafter"
        self._drafts = drafts
        self._depth = int(cache.device.type == "cuda" if overlap is None else overlap)
        self._flights: deque[InFlightStep] = deque()  # launched and not collected, the oldest first
        self._wait = StepWait()
        # requests of the step collected last, and what the drafter says behind it, where the host has not read that
        self._unread: tuple[list[Request], HostCopy] | None = None
        self.results = Results()  # collected and not returned
        self._builder = StepBuilder(cache, self.runner.draft_table)
        self._clock = clock
        self.gate = Gate()
        self._experts = experts
        self._num_output_tokens = 0
        self.seconds_waiting = 0.0  # how long the host has waited for results
        self._verifier = HitVerifier(cache, lambda: self.runner)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        can_run = not self.gate.is_still and self.scheduler.has_work
        return can_run or bool(self._flights) or bool(self.results) or self.sizes.is_called

    @property
    def has_idle_work(self) -> bool:
        """Whether `idle_step` has something to do: only while there is no other work."""
        return not self.has_work and not self.gate.is_shut and (bool(self.runner.missing) or self._verifier.has_work)

    def idle_step(self) -> None:
        """A graph left out at the start, or a forward call that compares cached prefixes with cold runs."""
        if not self.runner.capture_next(is_idle=True):
            self._verifier.step()

    def start_anew(self, name: str, *, clears: bool = False) -> None:
        """Forget cached prefixes, made by other weights than those called `name`; with `clears`, all cached rows."""
        assert not self._flights, "between two steps"
        self._verifier.forget()
        self.cache.start_anew(name)
        self.scheduler.start_anew(clears=clears)

    @property
    def num_slots(self) -> int:
        """Requests that can run at once."""
        return self.cache.schema.num_slots

    def stats(self) -> EngineStats:
        """Where the engine stands now."""
        scheduler = self.scheduler
        moved = TransferStats() if self._experts is None else self._experts.stats
        return EngineStats(
            num_waiting=scheduler.num_waiting + len(self.gate.held),
            num_slots=self.num_slots,
            num_blocks_used=self.cache.schema.num_blocks - self.cache.num_free_blocks,
            num_blocks=self.cache.schema.num_blocks,
            num_output_tokens=self._num_output_tokens,
            num_expert_hits=moved.num_hits,
            num_expert_misses=moved.num_misses,
            num_expert_bytes=moved.bytes_moved,
            seconds_waiting=self.seconds_waiting,
            num_verified_hits=self._verifier.num_verified,
            num_wrong_hits=self._verifier.num_wrong,
            drafts=None if self._drafts is None else self._drafts.stats(),
            **{name: getattr(scheduler, name) for name in SCHEDULER_COUNTS},
            **self.cache.prefix_stats(),
        )

    def prepare(
        self, prompt: Iterable[int], params: SamplingParams, constraint: Constraint | None = None
    ) -> Request:  # fmt: skip
        """A request that could run, not yet queued. `RequestError` if it could never."""
        config, limits = self.model.config, self.cache.limits
        token_ids = check_prompt(prompt, config.vocab_size, limits.max_context_tokens)
        check_params(params, config.vocab_size)
        request = Request.start(
            token_ids, params, max_context_tokens=limits.max_context_tokens,
            eos_token_id=config.eos_token_id, constraint=constraint,
        )  # fmt: skip
        self.gate.check()
        needed, total = blocks_at_position(request.max_len), self.cache.schema.num_blocks
        if needed > total:
            raise RequestError(
                f"the request may reach {request.max_len} tokens, which need {needed} cache blocks of {total}: "
                "lower max_tokens or raise num_blocks",
                field="max_tokens",
            )
        return request

    def submit(self, request: Request, waited: float = 0.0) -> None:
        """Queue a prepared request that has already waited `waited` seconds: its deadline counts from then. While the
        engine is paused, the request is not queued yet."""
        self._verifier.make_way()
        since = self._clock() - waited
        if self.gate.is_shut:
            self.gate.held[request] = since
        else:
            self.gate.stamp(request)
            self.scheduler.add(request, since)

    def resume(self) -> None:
        """Go on after `gate.shut`; what came meanwhile is queued."""
        for request, since in self.gate.open():
            self.gate.stamp(request)
            self.scheduler.add(request, since)

    def add(self, prompt: Iterable[int], params: SamplingParams) -> Request:
        """`prepare` and `submit`."""
        request = self.prepare(prompt, params)
        self.submit(request)
        return request

    def step(self) -> StepTokens:
        """Launch the next step, collect the one before it (without overlap, or with drafts: the same one too), and say
        what was drawn and which requests ended.

        A request whose logits are no numbers, whose constraint allows no token, whose deadline has passed or for which
        no block can ever be free fails alone (`Request.error`). If a call itself fails, every request in it is
        aborted: some layers may have moved on and others not, so none of them could be continued.
        """
        self.run_step()
        return self.take_results()

    def run_step(self) -> None:
        """As `step`, but what it gives is left for `take_results`."""
        started = time.perf_counter()
        with self.sizes.working():
            launched = self._launch()
            while len(self._flights) > (self._depth if launched else 0):
                self._collect()
            if launched is not None and launched.drawn is None:
                self._draw(launched)
            if launched is not None and launched.is_drafting:
                while self._flights:
                    self._collect()
        if launched is not None and self._drafts is not None and launched.plan:
            took = time.perf_counter() - started
            self._drafts.record_step_time(launched.plan.num_tokens, took, has_drafted=launched.num_drafts > 0)

    def take_results(self) -> StepTokens:
        """What was collected and not yet returned."""
        return self.results.take()

    def abort(self, request: Request) -> None:
        """Drop a request and free what it holds. One that has finished, or was never queued, is left as it is."""
        request.is_aborted |= self.gate.leave(request)
        self.scheduler.abort(request)
        self.results.forget()

    def finish(self, request: Request, reason: FinishReason = FinishReason.STOP) -> None:
        """The caller found the request's end (a stop string): it leaves as one that ended well. Later tokens go."""
        if not request.is_done:
            request.finish_reason = reason
            self.gate.leave(request)
            self.scheduler.settle(request)
            self.results.forget()

    def check_integrity(self) -> None:
        """Recompute the truth of the scheduler's, the cache's and the experts' books. Between two steps."""
        self.scheduler.check_integrity()
        self.cache.check_integrity()
        if self._experts is not None:
            self._experts.check_integrity()

    # ---- launching ----

    def _launch(self) -> InFlightStep | None:
        """The next step, on its way. Its draw too, unless a rule must hear of the step before first."""
        plan = None if self.gate.is_still else self._plan()
        try:
            size = self.sizes.agree(None if plan is None else self._size(plan))
            if size is None:
                return None
            flight = InFlightStep.launch(
                self.runner, self._builder, plan or StepPlan(), size, tells_experts=bool(self.observers)
            )
        except BaseException:
            if plan is not None:
                self._end_all(plan, partial(self.scheduler.discard, plan))
            raise
        if plan is not None:
            self.scheduler.commit(plan)
        must_wait = bool(self._flights) and flight.plan.has_rules
        self._flights.append(flight)
        if not must_wait:
            self._draw(flight)
        return flight

    def _plan(self) -> StepPlan | None:
        """What to run next; None if nothing can run now."""
        if self._drafts is not None:
            self._drafts.trim_drafts(self.scheduler.running)
        plan = self.scheduler.schedule(self._clock())
        self.results.ended += plan.failed
        if plan:
            return plan
        self.scheduler.commit(plan)
        if plan.is_waiting and not self._flights:
            self.cache.wait_for_files(_FILE_SECONDS)
        elif self.scheduler.num_waiting and not self._flights:
            raise NoFreeSlot(f"{self.scheduler.num_waiting} requests wait for slots or blocks held outside this engine")
        return None

    def _size(self, plan: StepPlan) -> StepSize:
        return StepSize(plan.num_tokens, plan.num_drawing, self._num_asked(plan), wants_picks(plan))

    def _num_asked(self, plan: StepPlan) -> int:
        """How many drafts to ask for behind the step."""
        return self._drafts.how_many(plan.num_drawing) if self._drafts is not None and plan.num_drawing else 0

    def _draw(self, flight: InFlightStep) -> None:
        """Launch the draw, once rules have said what they allow."""
        try:
            if flight.plan.has_rules:
                self._read_drafts()
            flight.draw(self.runner, make_masks(flight.plan, self.model.config.vocab_size, self.cache.device))
        except BaseException:
            self._flights.remove(flight)
            self._drop(flight)
            raise

    # ---- collecting ----

    def _collect(self) -> None:
        """What the oldest step drew. Requests that are over, or cannot go on, are marked so and leave."""
        flight = self._flights[0]
        assert flight.drawn is not None, "a step is drawn before the next one is collected"
        try:
            started = time.perf_counter()
            self._read_drafts()
            found = self._wait.until_over(flight.drawn, flight.plan.num_tokens, flight.launched)
            self.seconds_waiting += time.perf_counter() - started
            flight.scores.read()
            offers, drawn = self._offers(flight), flight.outcomes(found)
            flight.tell_experts(self.observers, drawn)
        except BaseException:  # the device failed: nothing that was launched can be trusted
            self._drop_flights()
            raise
        self._flights.popleft()
        if flight.plan.rows:
            self._settle_rows(flight, [part[: len(flight.plan.rows)] for part in found])
        self._settle(flight.plan.others, drawn)
        self._offer(flight.plan, offers)

    def _offers(self, flight: InFlightStep) -> list[Offer]:
        """Drafts for the requests that drew: `UNREAD` where the host need not read them yet."""
        drawing = [piece.request for piece in flight.plan.others if piece.draws]
        if flight.drafted is None or self._drafts is None or self._drafts.must_read:
            return read_offers(flight.drafted, len(drawing))
        self._unread = drawing, flight.drafted
        return [Offer((UNREAD,) * flight.num_drafts, None)] * len(drawing)

    def _read_drafts(self) -> None:
        """What the drafter said behind the step collected last, if that has not been read."""
        if self._unread is None:
            return
        (drawing, drafted), self._unread = self._unread, None
        counts = [len(request.drafts) for request in drawing]  # 0 of those that left, or start again
        for request in drawing:
            request.drafts = ()  # should they never arrive
        for request, count, offer in zip(drawing, counts, read_offers(drafted, len(drawing)), strict=True):
            request.drafts = offer.drafts[:count]

    def _settle_rows(self, flight: InFlightStep, found: Sequence[Tensor]) -> None:
        """Each row of a step gets its token; requests that end with it leave. `found`: what was drawn, by row."""
        step, token_ids = flight.plan.rows, flight.without_stuck(found[0].numpy())
        taken = self.scheduler.rows.take(step, token_ids)
        listed = listed_logprobs(token_ids.tolist(), step.counts or (), found[1:])
        self._num_output_tokens += len(taken.requests)
        self.results.add(taken.requests, taken.token_ids, [listed[row] for row in taken.rows] if listed else ())
        for request in taken.ended:
            self.scheduler.settle(request)
        self.results.ended += taken.ended
        for row in (*taken.left, *taken.invalid):
            request, token_id = step.requests[row], int(token_ids[row])
            was_done = request.is_done
            request.num_unread -= 1
            drawn = Drawn(token_id, listed[row] if listed else None)
            self._take(request, drawn if token_id >= 0 else flight.undrawable(row, token_id))
            self._let_go(request, was_done)
        for row in step.ruled:
            request = step.requests[row]
            if row not in taken.left and not request.is_done:
                self._tell_rule(request, int(token_ids[row]))
                self._let_go(request, was_done=False)

    def _settle(self, pieces: Sequence[Piece], drawn: Sequence[Outcome]) -> None:
        """Each request of these pieces gets what it drew; those that are over leave. `drawn` has an outcome for every
        piece that draws, and one more for each of its drafts."""
        for piece, found in by_piece(pieces, drawn):
            request = piece.request
            was_done = request.is_done
            if found:
                request.num_unread -= 1
                num_true = num_accepted(piece, found)
                num_taken = sum(self._take(request, outcome) for outcome in found[: 1 + num_true])
                if piece.num_drafts:
                    self._keep(piece, num_true, num_taken)
                request.drafts = ()
            request.end_if_read(piece.end)
            self._let_go(request, was_done)

    def _let_go(self, request: Request, was_done: bool) -> None:
        """A request that is over leaves; if it was not `was_done` before, this is what ended it."""
        if request.is_done:
            self.scheduler.settle(request)
            if not was_done:
                self.results.ended.append(request)

    def _keep(self, piece: Piece, num_true: int, num_taken: int) -> None:
        """Account for a piece: its accepted drafts, and the draws that the request took before it ended."""
        self.scheduler.keep(piece, num_true)
        if self._drafts is not None and num_taken:
            is_over = num_taken <= num_true  # at a draft: those behind it were not tried
            self._drafts.record(num_taken if is_over else piece.num_drafts, min(num_taken, num_true))

    def _offer(self, plan: StepPlan, offers: Sequence[Offer]) -> None:
        """Each request that drew gets what the drafter says comes next."""
        if not offers or self._drafts is None:
            return
        drawing = [piece.request for piece in plan.others if piece.draws]
        for request, offer in zip(drawing, offers, strict=True):
            if not request.is_done and request.slot is not None:
                self._drafts.offer(request, offer.drafts, offer.confidences)

    def _take(self, request: Request, outcome: Outcome) -> bool:
        """Whether the request is still there to take it: it may be over, or aborted, since the step was launched."""
        if request.is_done:
            return False
        if isinstance(outcome, Undrawable):
            request.error = outcome.reason
            return True
        request.append(outcome.token_id, outcome.logprobs)
        self._num_output_tokens += 1
        self.results.append(request, outcome.token_id, outcome.logprobs)
        if request.finish_reason is None:
            self._tell_rule(request, outcome.token_id)
        return True

    def _tell_rule(self, request: Request, token_id: int) -> None:
        if request.constraint is not None:
            try:
                request.constraint.accept(token_id)
            except Exception as error:  # a rule is not our code: whatever it does, it does to its own request
                request.error = constraint_failure(error)

    def _drop_flights(self) -> None:
        while self._flights:
            self._drop(self._flights.popleft())

    def _drop(self, flight: InFlightStep) -> None:
        """The step failed: its requests are aborted."""
        requests = [piece.request for piece in flight.plan.pieces]
        self._end_all(flight.plan, lambda: deque(map(self.scheduler.abort, requests), maxlen=0))

    def _end_all(self, plan: StepPlan, drop: Callable[[], object]) -> None:
        """`drop` the requests of a plan, and say that they ended."""
        running = [piece.request for piece in plan.pieces if not piece.request.is_done]
        drop()
        self.results.ended += [request for request in running if request.is_done]
