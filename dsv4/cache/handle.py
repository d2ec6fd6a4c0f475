"""`LayerCacheHandle`: the typed views of one layer's cache its ops read and write. Making one allocates nothing."""

from dataclasses import dataclass

from torch import Tensor

from dsv4.formats.row_store import RowStore


@dataclass(frozen=True)
class WindowView:
    """The ring of recent K=V rows. Position p of a request lives at rows[slot, p % ring_len].

    rows [slots, ring_len]; positions int32 [slots, ring_len]: the absolute position each row holds, -1 if none.
    """

    rows: RowStore
    positions: Tensor

    @property
    def ring_len(self) -> int:
        return self.positions.shape[1]


@dataclass(frozen=True)
class PagedView:
    """Compressed rows behind the block table. Entry e of a request lives at rows[table[slot, e // E], e % E].

    rows [num_blocks, E] with E entries per 128-token block.
    """

    rows: RowStore

    @property
    def entries_per_block(self) -> int:
        return self.rows.data.shape[1]


@dataclass(frozen=True)
class TailView:
    """Raw projections of recent tokens, a ring by position: token p at [slot, p % len]. kv and score [slots, len, Dc].

    A fresh slot holds kv 0 and score -inf, so that an absent row weighs nothing.
    """

    kv: Tensor
    score: Tensor

    @property
    def ring_len(self) -> int:
        return self.kv.shape[1]


@dataclass(frozen=True)
class CompressorView:
    """One compressor's state. `own` feeds the block a token is in; `following` (CSA only) feeds the next block.

    The two are separate projections of the token: after a flush the next entry needs `following` of the last four
    tokens, which nothing in `own` can replace.
    """

    own: TailView
    following: TailView | None


@dataclass(frozen=True)
class LayerCacheHandle:
    """What one layer may touch during one call. SWA layers have only the window; HCA layers have no indexer."""

    window: WindowView
    entries: PagedView | None = None
    compressor: CompressorView | None = None
    index_keys: PagedView | None = None
    index_compressor: CompressorView | None = None
