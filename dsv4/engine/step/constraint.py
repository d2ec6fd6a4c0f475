"""What may come next in a request whose output must follow a rule (a JSON schema, a forced tool call)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from dsv4.errors import Dsv4Error


class ConstraintError(Dsv4Error, RuntimeError):
    """The rule cannot be followed any further: it met a limit of its own, or a token it does not allow."""


class Constraint(Protocol):
    """One request's rule, at one place in its output. Called by the engine only, between forward calls."""

    def allowed(self) -> Tensor:
        """bool [vocab], on the CPU: the tokens that may come next, the end of sequence among them where it may end."""

    def accept(self, token_id: int) -> None:
        """The request has drawn this token, or may have: see `rollback`. `ConstraintError` if the rule cannot go on."""

    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens that `accept` was given, one it refused and errors of `allowed` behind them
        included: they were drafts, tried to see what they would allow."""
