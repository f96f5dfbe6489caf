"""Responses that were asked for before they could begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import CreateResponse

# Bound: each keeps what it is to answer.
MAX_WAITING = 16


class WaitingRequests:
    """Requests in the order in which they came, each of which waits for a transcript, for media or for a response."""

    def __init__(self) -> None:
        self._requests: list[CreateResponse] = []
        # Of them, those that were cancelled meanwhile. They still begin, so that the client is told of their end.
        self._withdrawn: list[CreateResponse] = []

    def __bool__(self) -> bool:
        return bool(self._requests)

    @property
    def stored(self) -> list[CreateResponse]:
        """The conversation's own that wait and were not withdrawn, in their order."""
        return [r for r in self._requests if r.stored and not any(r is other for other in self._withdrawn)]

    def check(self) -> None:
        """Raise RemoteProtocolError (`too_many_responses`) where MAX_WAITING requests wait."""
        if len(self._requests) >= MAX_WAITING:
            raise RemoteProtocolError(
                "too_many_responses", f"Conversation already has {MAX_WAITING} responses to make."
            )

    def add(self, request: CreateResponse) -> None:
        """Have a request wait behind the others. One that was to cut them has done so, and only waits from now on."""
        self._requests.append(replace(request, when_busy="wait") if request.when_busy == "cut" else request)

    def withdraw(self) -> bool:
        """Cancel the conversation's own requests that wait now. Returns whether there was one."""
        self._withdrawn = [request for request in self._requests if request.stored]
        return bool(self._withdrawn)

    def take(self, has_to_wait: Callable[[CreateResponse], bool]) -> tuple[CreateResponse, bool] | None:
        """The oldest request, and whether it was withdrawn; None where there is none, or the oldest has to wait on."""
        if not self._requests or has_to_wait(self._requests[0]):
            return None
        request = self._requests.pop(0)
        withdrawn = any(request is other for other in self._withdrawn)
        self._withdrawn = [other for other in self._withdrawn if other is not request]
        return request, withdrawn
