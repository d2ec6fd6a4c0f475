"""`Recorder`: writes a line for every answer, in a thread of its own.

    with Recorder(RecordFile("receipts.jsonl"), header_of(llm)) as recorder:
        for params, completion in zip(asked, llm.generate(prompts, asked)):
            recorder.add(Answer.of(params, completion))

Recording never delays a request, and never fails one.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import asdict
from types import TracebackType
from typing import Literal

from dsv4.llm import LLM
from dsv4.loader.progress import Progress
from dsv4.tools.receipts.digests import checkpoint_parts
from dsv4.tools.receipts.files import RecordFile
from dsv4.tools.receipts.lines import Answer, Gap, Header, gap_line, header_line, now, request_line

_LOG = logging.getLogger("dsv4.receipts")
_MAX_PENDING = 1024  # answers that wait for the disk; more are lost, and counted


def header_of(llm: LLM, *, hashes_only: bool = False, progress: Progress = False) -> Header:
    """What runs here. Reads every byte of the checkpoint once more, unless its digests are kept (digests.py)."""
    limits, checkpoint = llm.cache.limits, llm.checkpoint
    return Header(
        identity=asdict(llm.identity()),
        parts={} if checkpoint is None else checkpoint_parts(checkpoint, llm.config, progress),
        model=None if checkpoint is None else str(checkpoint.path.resolve()),
        settings={
            "numerics": llm.numerics,
            "dtype": str(llm.model.context.dtype).removeprefix("torch."),
            "device": llm.cache.device.type,
            "max_context_tokens": limits.max_context_tokens,
            "max_concurrent_requests": limits.max_concurrent_requests,
            "max_chunk_tokens": limits.max_chunk_tokens,
        },
        time=now(),
        hashes_only=hashes_only,
    )


class Recorder:
    """`add` from any thread; `close` writes what is left. A disk that is full or gone is logged once, and
    tried again with every answer; the record then says how many are missing."""

    def __init__(self, file: RecordFile, header: Header) -> None:
        self._file = file
        self._hashes_only = header.hashes_only
        file.begin(header_line(header))
        self._queue: queue.Queue[bytes | None] = queue.Queue(_MAX_PENDING)
        self._lock = threading.Lock()
        self._num_lost = 0  # since the last line that was written
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="dsv4-receipts", daemon=True)
        self._thread.start()

    @property
    def kind(self) -> Literal["whole", "hashes"]:
        """Whether lines hold prompts and answers, or digests alone."""
        return "hashes" if self._hashes_only else "whole"

    def add(self, answer: Answer, *, request_id: str = "", route: str = "", choice: int = 0) -> None:
        """Record an answer, unless it ended early and has no token: then there is nothing to prove."""
        if answer.is_proof:
            self.add_line(
                request_line(
                    answer, hashes_only=self._hashes_only, request_id=request_id, route=route, choice=choice, time=now()
                )
            )

    def add_line(self, line: bytes) -> None:
        """Record an answer whose line was made elsewhere (`request_line`). Never blocks, never raises."""
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self._lose(f"{_MAX_PENDING} answers wait to be written; the disk is too slow")

    def close(self) -> None:
        """Write what was added; then nothing more is taken. Safe to repeat."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the thread ----

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            self._write(line)
            if self._queue.empty():
                self._sync()
            self._queue.task_done()

    def _write(self, line: bytes) -> None:
        with self._lock:
            num_lost = self._num_lost
        try:
            self._file.append((gap_line(Gap(num_lost)) if num_lost else b"") + line)
        except Exception as error:  # whatever it is, requests are answered
            self._lose(str(error))
            return
        if num_lost:
            with self._lock:
                self._num_lost -= num_lost
                self._is_failing = False
            _LOG.warning("recording to %s goes on; %d requests before are missing", self._file.path, num_lost)

    def _sync(self) -> None:
        try:
            self._file.sync()
        except OSError as error:
            _LOG.error("%s may not be on the disk: %s", self._file.path, error)

    def _lose(self, reason: str) -> None:
        with self._lock:
            self._num_lost += 1
            is_first, self._is_failing = not self._is_failing, True
        if is_first:
            _LOG.error(
                "cannot record to %s: %s. Requests are answered and not recorded until it works again",
                self._file.path, reason,
            )  # fmt: skip
