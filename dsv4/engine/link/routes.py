"""`TokenRoutes`: which token of a step goes to which client. No torch."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dsv4.engine.link.connection import ClientConnection
from dsv4.engine.link.messages import pack_ids
from dsv4.engine.request import Request
from dsv4.engine.step.tokens import StepTokens


class TokenRoutes:
    """`owners`: the client of each request, and its handle there. While the requests stay the same, a client costs one
    selection a step, whatever their number."""

    def __init__(self, owners: Mapping[Request, tuple[ClientConnection, int]]) -> None:
        self._owners = owners
        self._routed: dict[int, tuple[Request, ...]] = {}  # by rank
        self._routes: dict[int, list[tuple[ClientConnection, NDArray[np.int64], bytes]]] = {}

    def deliver(self, rank: int, tokens: StepTokens) -> None:
        """Tokens that a rank gave, to the clients that wait for them."""
        if tokens.requests is not self._routed.get(rank):
            self._route(rank, tokens.requests)
        for client, places, handles in self._routes[rank]:
            if tokens.logprobs:
                for row, place in enumerate(places.tolist(), start=client.num_tokens):
                    logprobs = tokens.logprobs.get(place)
                    if logprobs is not None:
                        client.add_logprobs(row, tokens.requests[place], logprobs)
            client.add_tokens(handles, tokens.token_ids[places])

    def _route(self, rank: int, requests: tuple[Request, ...]) -> None:
        """Which tokens of such a step go to which client."""
        places: dict[ClientConnection, list[int]] = {}
        handles: dict[ClientConnection, list[int]] = {}
        for place, request in enumerate(requests):
            if request not in self._owners:
                continue  # dropped since
            client, handle = self._owners[request]
            if handle not in client.started:
                client.start(handle, request)
            places.setdefault(client, []).append(place)
            handles.setdefault(client, []).append(handle)
        self._routed[rank] = requests
        self._routes[rank] = [(client, np.array(found), pack_ids(handles[client])) for client, found in places.items()]
