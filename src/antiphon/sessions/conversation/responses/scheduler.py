"""When responses begin: those that the user's turns owe, and those that a client has asked for before they could."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from antiphon.events.conversation import ConversationCommand, CreateResponse, Item
from antiphon.events.transcription import OverlapDecided
from antiphon.sessions.conversation.context import EmitConversation
from antiphon.sessions.conversation.item_media import ItemMediaResolver
from antiphon.sessions.conversation.native_turns import NativeTurns
from antiphon.sessions.conversation.responses.responder import SESSION_ENDED, Responder
from antiphon.sessions.conversation.responses.waiting_requests import WaitingRequests
from antiphon.turns.floor import AnswerInstead, BeginAnswer, CancelActive, Floor, FloorCommand, SilenceOutput


class ResponseScheduler:
    """Begins the responses of one conversation once nothing has to be waited for.

    - `floor`: says what the user's turns owe. `responder`: has the responses under way.
    - `item_media`: knows whose images and audio are still being read.
    - `native`: the turns of a model that takes them by itself, which speaks what is asked for; None: `responder` does.
    - `emit`: is awaited with what the client is told. `handle`: carries out a command, as the session does.
    """

    def __init__(
        self,
        floor: Floor,
        responder: Responder,
        item_media: ItemMediaResolver,
        native: NativeTurns | None,
        emit: EmitConversation,
        handle: Callable[[ConversationCommand], Awaitable[None]],
    ) -> None:
        self._floor = floor
        self._responder = responder
        self._item_media = item_media
        self._native = native
        self._emit = emit
        self._handle = handle
        self._waiting = WaitingRequests()

    def has_waiting(self) -> bool:
        """Whether a request of the client waits to begin."""
        return bool(self._waiting)

    @property
    def owed(self) -> list[CreateResponse]:
        """The responses of the conversation that are under way, due to the user's turns, or waiting, in their order."""
        active = self._responder.active
        under_way = [active.response.request] if active and active.response.status == "in_progress" else []
        return [*under_way, *([CreateResponse()] if self._floor.answer_due else []), *self._waiting.stored]

    def has_unresolved(self) -> bool:
        """Whether an item of the history has no transcript yet, or media of an item are not resolved."""
        return bool(self._item_media.unresolved) or self._floor.has_untranscribed()

    # --- what the client asks for -------------------------------------------------------------------------------------

    async def ask(self, command: CreateResponse, resolve: Callable[[Item], None]) -> None:
        """Begin a response, or have it wait. `resolve` is called with each item that the request brings.

        Raises RemoteProtocolError where the conversation may not have another response now.
        """
        self._waiting.check()
        for given in command.items or ():
            if isinstance(given, Item):
                resolve(given)
        if command.when_busy == "cut":
            await self.interrupt("client_cancelled")
        if self._has_to_wait(command):
            self._waiting.add(command)
        elif self._native:
            self._native.ask(command)
        else:
            self._responder.begin(command)

    def withdraw(self) -> bool:
        """Cancel the conversation's own requests that wait now. Returns whether there was one."""
        is_due = bool(self._native and self._native.withdraw())
        return self._waiting.withdraw() or is_due

    async def interrupt(self, reason: str) -> None:
        """Cancel the response with `reason`, and those that wait if the client does; truncate to what was heard."""
        if reason == "client_cancelled":
            self._waiting.withdraw()
        await self._responder.interrupt(reason)

    def _has_to_wait(self, request: CreateResponse) -> bool:
        """Whether a turn is still being transcribed, an item's media are not resolved, or it waits for a response: for
        any if it says so, and for one that was cancelled and is still being closed.
        """
        active = self._responder.active
        is_first = active is None or (request.when_busy == "refuse" and not (request.stored and active.cancelled))
        return not is_first or (self._native is None and self.has_unresolved())

    # --- what is due --------------------------------------------------------------------------------------------------

    async def go_on(self, *, interrupts: bool = True) -> None:
        """Begin the response that is due, and those that had to wait. `interrupts`: a response under way may be ended
        for the one that is due.
        """
        await self.respond_if_due(interrupts=interrupts)
        while taken := self._waiting.take(self._has_to_wait):
            request, withdrawn = taken
            await self._handle(request)
            if self._floor.is_closed:
                self._responder.cancel_all(SESSION_ENDED)
            elif withdrawn and self._native:
                self._native.withdraw()
            elif withdrawn and self._responder.active:
                self._responder.cancel(None)

    async def respond_if_due(self, *, interrupts: bool = True) -> None:
        """Begin the response that the user's turns owe, if it may begin by now."""
        active = self._responder.active
        may_cut = bool(active and not active.cancelled) and self._responder.config.interrupt_response and interrupts
        await self.obey(self._floor.go_on(is_resolved=not self.has_unresolved(), may_cut=may_cut))

    async def obey(self, commands: list[FloorCommand]) -> None:
        """Do what the floor asks for, in its order."""
        for command in commands:
            match command:
                case CancelActive(reason):
                    assert self._responder.active
                    self._responder.active.cancel(reason)
                case SilenceOutput():
                    await self._responder.silence()
                case BeginAnswer():
                    self._responder.begin(CreateResponse(), unasked=True)
                case AnswerInstead():
                    await self._emit(OverlapDecided(None, True, "turn_answered"))
                    await self.interrupt("turn_detected")
