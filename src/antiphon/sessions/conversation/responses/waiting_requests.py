"""The requests for responses of one conversation that have to wait, for a transcript, for media or for a response."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import CreateResponse

# Maximum number of waiting requests. It is bounded because each keeps the items that it is to answer.
MAX_WAITING = 16
# The request for the response to the results of calls.
AFTER_CALLS = CreateResponse(when_busy="wait")


class WaitingRequests:
    """Requests for responses, in order of arrival. Each waits for a transcript, for media or for another response.

    Only the oldest one may begin, so that the responses come in the order of their requests.
    """

    def __init__(self) -> None:
        self._requests: list[CreateResponse] = []
        # The waiting requests that were cancelled. Their responses still begin, so that their end can be reported.
        self._withdrawn: list[CreateResponse] = []

    def __bool__(self) -> bool:
        return bool(self._requests)

    @property
    def owed(self) -> list[CreateResponse]:
        """The waiting requests that were not withdrawn, in order."""
        return [r for r in self._requests if not any(r is other for other in self._withdrawn)]

    def check(self) -> None:
        """Raise RemoteProtocolError (`too_many_responses`) if MAX_WAITING requests wait."""
        if len(self._requests) >= MAX_WAITING:
            raise RemoteProtocolError(
                "too_many_responses", f"Conversation already has {MAX_WAITING} responses waiting."
            )

    def add(self, request: CreateResponse) -> None:
        """Append a request. Any interruption that it caused has already happened. From now on it only waits."""
        self._requests.append(replace(request, when_busy="wait") if request.when_busy == "cut" else request)

    def withdraw(self) -> bool:
        """Cancel the waiting requests for the conversation's own responses. Returns whether any were waiting."""
        self._withdrawn = [request for request in self._requests if request.stored]
        return bool(self._withdrawn)

    def take(self, has_to_wait: Callable[[CreateResponse], bool]) -> tuple[CreateResponse, bool] | None:
        """Remove the oldest request, and return it and whether it was withdrawn. Returns None if it still has to wait,
        or if no request waits.
        """
        if not self._requests or has_to_wait(self._requests[0]):
            return None
        request = self._requests.pop(0)
        withdrawn = any(request is other for other in self._withdrawn)
        self._withdrawn = [other for other in self._withdrawn if other is not request]
        return request, withdrawn
