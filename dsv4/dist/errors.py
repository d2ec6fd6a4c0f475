"""What can go wrong between ranks. No torch."""

from __future__ import annotations


class RankFailed(RuntimeError):
    """A rank ended, hung or failed, and with it the model they share."""


class PeerLost(RuntimeError):
    """An exchange could not be completed: another rank has gone, or is not where this one is."""


class ExchangeDamaged(RuntimeError):
    """What arrived is not what was sent."""


class RanksDiverged(RuntimeError):
    """A rank is not where rank 0 takes it to be: a plan was lost, or their books differ."""
