"""`Drafter`: what the engine asks of a draft model, MTP (mtp.py) or a DSpark head (dspark.py).

A round of the engine, all of it on the device and of shapes the host knows, so that it can be captured in a graph:

    tap = drafter.tap(batch.num_tokens)
    streams = model.forward(batch, cache.handle, tap)            # the target: prompt chunks, or 1 + k rows a request
    extended = drafter.extend(batch, tap.hidden, next_ids)       # the drafter's own rows of the same tokens
    proposal = drafter.propose(ends, extended, num_drafts, choose)

`extend` runs for every row of every forward call, in the order of the calls: what it writes is state like the window
ring's. `propose` is for the requests that know their newest token; what it writes is rewritten before it is read.

State is a ring of window rows for each draft block, addressed by position. That is why nothing is rolled back:

* Rows of rejected drafts. `extend` may be given all 1 + k rows of a verified request, with any id for a row behind
  the last accepted one. Their rows lie at positions that the next `propose` or `extend` writes before it reads them,
  and a ring longer than the window by the most drafts of a round (cache/schema.py) loses nothing by them.
* Rows of `propose` itself lie from the anchor's position on, where the next `extend` writes the true ones.

Prefix hits. MTP's row of position p is made of token p + 1 too. So of a cached prefix of m tokens, row m - 1 may only
be used if the same token follows; else it is computed again, for which the target must process token m - 1 again. A
DSpark row of position p depends on tokens up to p alone. Rows m - 128 .. m - 1 must be there, or drafts are worse until
they are: taps cannot be had from the target's cache. Neither changes what the target says.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from dsv4.cache.batch import TokenBatch
from dsv4.model.block import BlockOutput

Choose = Callable[[Tensor, int], Tensor]
"""Logits [R, vocab] of draft i (0 is the first) -> token ids int64 [R], all of them inside the vocabulary, of padding
and of NaN too. Drafts agree most with the target if they are chosen as it chooses: the noise of draft i is that of the
request's token at position `ends.positions` + 1 + i, and penalties count the drafts before it."""


@dataclass(frozen=True)
class DraftEnds:
    """Where R requests stand, int64 [R] each.

    slots      of the cache; -1 marks a padded row, which changes nothing
    positions  of the anchor, the newest token: as many tokens come before it
    anchors    its id, inside the vocabulary, of padding too
    rows       the row of the batch given to the last `extend` that holds the token before the anchor
    """

    slots: Tensor
    positions: Tensor
    anchors: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Proposal:
    """drafts int64 [R, k], for the positions behind the anchor; where the drafter has them, confidences [R, k], the
    probability of each to be accepted if those before it are, and base_logits [R, k, vocab], before a Markov bias."""

    drafts: Tensor
    confidences: Tensor | None = None
    base_logits: Tensor | None = None


class Tap(Protocol):
    """Given to the target's forward call as its observer; holds what the drafter needs of its rows."""

    def __call__(self, layer_idx: int, output: BlockOutput) -> None: ...

    @property
    def hidden(self) -> Tensor:
        """One row per token of the call, [T, ...]."""


class Drafter(Protocol):
    """See the head of this file. A drafter holds its weights and the rings of its layers; not for several threads."""

    @property
    def max_drafts(self) -> int:
        """Most drafts of one `propose`."""

    @property
    def rows_per_request(self) -> int:
        """Rows of a request that a call inside `propose` has, one request after the other."""

    def tap(self, num_tokens: int) -> Tap:
        """An observer for one forward call of this many tokens."""

    def extend(self, batch: TokenBatch, hidden: Tensor, next_ids: Tensor) -> Tensor | None:
        """Write the drafter's rows of the batch's tokens. next_ids int64 [T]: the token behind each, which for the last
        row of a chunk of a prompt is the next prompt token. Returns what `propose` goes on from.
        """

    def propose(self, ends: DraftEnds, extended: Tensor | None, num_drafts: int, choose: Choose) -> Proposal:
        """Drafts behind the anchors. `extended` is what `extend` returned for the batch that `ends.rows` point into."""
