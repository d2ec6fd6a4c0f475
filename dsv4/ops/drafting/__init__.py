"""Small ops of drafting: what a DSpark head takes from the target, how sure it is of a draft, which drafts stay."""

from dsv4.ops.drafting.launch import accept, confidence, tap_streams
from dsv4.ops.drafting.op import Acceptance, accept_ref, confidence_ref, tap_streams_ref
from dsv4.ops.drafting.plan import ACCEPT_ROWS

__all__ = [
    "ACCEPT_ROWS", "Acceptance", "accept", "accept_ref", "confidence", "confidence_ref", "tap_streams",
    "tap_streams_ref",
]
