"""What can go wrong between ranks. No torch."""

from dsv4.errors import Dsv4Error


class RankFailed(Dsv4Error, RuntimeError):
    """A rank ended, hung or failed, and with it the model they share."""


class PeerLost(Dsv4Error, RuntimeError):
    """An exchange could not be completed: another rank has gone, or is not where this one is."""


class ExchangeDamaged(Dsv4Error, RuntimeError):
    """What arrived is not what was sent."""


class RanksDiverged(Dsv4Error, RuntimeError):
    """A rank is not where another takes it to be: it has run more steps, or fewer."""
