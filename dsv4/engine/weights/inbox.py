"""`WeightInbox`: tensors of a trainer, call by call, until they are a whole model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta

import torch

from dsv4.engine.request import WeightsIncomplete
from dsv4.engine.weights.group import Broadcasts, Coming, WeightGroup
from dsv4.engine.weights.update import IncomingWeights
from dsv4.loader.memory_source import TensorSource
from dsv4.request import RequestError

_WAIT_SECONDS = 300


class WeightInbox:
    """incoming  what has come of a model, if it has come in part"""

    def __init__(self) -> None:
        self._joining: Future[WeightGroup] | None = None
        self.incoming: IncomingWeights | None = None

    def join(
        self, device: torch.device, master_address: str, master_port: int, *, rank_offset: int, world_size: int,
        backend: str, group_name: str, timeout: float | None,
    ) -> Future[WeightGroup]:  # fmt: skip
        """Join the trainer's group, whose rank 0 waits at that address; the one before is left. Done once all members
        have come, in a thread of its own: requests go on meanwhile."""
        self._leave()
        seconds = _WAIT_SECONDS if timeout is None else timeout
        joining = self._joining = Future[WeightGroup]()

        def work() -> None:
            try:
                group = WeightGroup(
                    master_address, master_port, rank=rank_offset, world_size=world_size, device=device,
                    backend=backend, name=group_name, timeout=timedelta(seconds=seconds),
                )  # fmt: skip
            except RuntimeError as error:  # torch's: no master there, or a member is missing
                place = f"{master_address}:{master_port}"
                joining.set_exception(RequestError(f"master_address: no group at {place} in {seconds} s: {error}"))
            except Exception as error:  # becomes the answer
                joining.set_exception(error)
            else:
                joining.set_result(group)

        threading.Thread(target=work, name="dsv4-join", daemon=True).start()
        return joining

    def group(self, patience: float = 0.0) -> WeightGroup:
        """The group that was joined, or will be within `patience` seconds."""
        if self._joining is None:
            raise RequestError("there is no group to receive from: init_group first")
        try:
            return self._joining.result(patience)
        except TimeoutError:
            raise RequestError("the engine has not joined its group yet: wait for the answer of init_group") from None

    def next(self, make: Callable[[], IncomingWeights]) -> IncomingWeights:
        """What the tensors that come now belong to. Any error from here on drops what has come and was not written."""
        incoming, self.incoming = self.incoming or make(), None
        return incoming

    def receive(self, incoming: IncomingWeights, group: Broadcasts, coming: Coming) -> bool:
        """Whether the model is whole with these, which `incoming` was announced. All of them are received, whatever is
        wrong with one: the trainer sends them."""
        problem = None
        try:
            for name, tensor in group.receive(coming):
                if problem is not None:
                    continue
                try:
                    incoming.add(name, tensor)
                except Exception as error:  # raised below, once all have come
                    problem = error
        except RuntimeError as error:
            self._leave()
            raise RequestError(f"the group is lost: {error}; init_group again") from None
        if problem is not None:
            raise problem
        return self._settle(incoming)

    def take(self, incoming: IncomingWeights, given: TensorSource) -> bool:
        """As `receive`, of tensors that are here until this returns: those of parts that are not whole are copied."""
        incoming.announce(given.tensors.values())
        incoming.hold(given)
        return self._settle(incoming)

    def _settle(self, incoming: IncomingWeights) -> bool:
        is_whole = incoming.settle()
        if not is_whole:
            self.incoming = incoming
        return is_whole

    def check_empty(self) -> None:
        """`WeightsIncomplete` while a model has come in part."""
        if self.incoming is not None:
            raise WeightsIncomplete(
                f"new weights have come in part: {self.incoming.what_is_missing()}; send the rest, or update_weights "
                "with a whole model"
            )

    def _leave(self) -> None:
        if self._joining is not None:
            self._joining.add_done_callback(lambda made: None if made.exception() else made.result().close())
            self._joining = None
