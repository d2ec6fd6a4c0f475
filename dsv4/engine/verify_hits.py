"""`HitVerifier`: in idle time, reads a share of the cached prefixes again without the cache and compares every bit.

A prefix is what a later request starts from: its blocks and its snapshot. If those have the bits of a cold run, so has
everything computed from them. A difference is a defect, here or in the machine: it is logged with what is needed to
see it again, and the prefix is not used any more.
"""

import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.cache.errors import CacheError, OutOfBlocks
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.tree import ChainKeys

_LOG = logging.getLogger("dsv4.engine")


class _Runner(Protocol):
    def forward(self, batch: TokenBatch, draw_rows: Tensor) -> object: ...


class HitVerifier:
    """`step` while nothing else is to be done; `make_way` as soon as something is. `runner` is asked for every time."""

    def __init__(self, cache: KVCacheManager, runner: Callable[[], _Runner]) -> None:
        self._cache = cache
        self._runner = runner
        self._chain: ChainKeys | None = None
        self._slot: int | None = None
        self.num_verified = self.num_wrong = 0

    @property
    def has_work(self) -> bool:
        prefix = self._cache.prefix
        return self._chain is not None or (prefix is not None and bool(prefix.to_verify))

    def make_way(self) -> None:
        """Give back slot and blocks; what was begun begins again later."""
        if self._slot is not None:
            self._cache.release(self._slot, keep=False)
            self._slot = None

    def forget(self) -> None:
        """What was begun is not compared: the weights have changed."""
        self._finish()

    def step(self) -> None:
        """One forward call of a cold run, and the comparison after the last one."""
        prefix = self._cache.prefix
        assert prefix is not None, "without a prefix cache there are no hits"
        if self._chain is None:
            self._chain = prefix.to_verify.popleft()
        token_ids = self._chain.token_ids
        try:
            if self._slot is None:
                self._slot = self._cache.admit(len(token_ids))
            start = self._cache.position(self._slot)
            end = min(start + self._cache.limits.chunk_tokens, len(token_ids))
            batch = self._cache.make_batch([self._slot], [token_ids[start:end]])
        except (OutOfBlocks, CacheError):  # no room even now: this prefix is not looked at
            self._finish()
            return
        try:
            self._runner().forward(batch, torch.empty(0, dtype=torch.int64, device=self._cache.device))
        except BaseException:
            self._finish()
            raise
        if end == len(token_ids):
            self._compare()

    def _compare(self) -> None:
        chain, slot = self._chain, self._slot
        assert chain is not None and slot is not None
        differing = self._cache.differences(slot, chain)
        if differing is not None:
            self.num_verified += 1
        if differing:
            self.num_wrong += 1
            _LOG.error(
                "a cached prefix of %d tokens differs from a cold run in %s; it is not used any more. To reproduce: "
                "fingerprint %r, key %s, limits %r, token ids %s", len(chain.token_ids), ", ".join(differing),
                self._cache.fingerprint, chain.first(chain.num_known)[-1].hex(), self._cache.limits,
                list(chain.token_ids),
            )  # fmt: skip
            self._cache.forget(chain)
        self._finish()

    def _finish(self) -> None:
        self.make_way()
        self._chain = None
