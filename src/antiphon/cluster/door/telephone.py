"""A telephone call that a door holds: its leg is at the door, and its conversation at a host, or at the next one.

To its host, the call is a client like others. So the functions of the call are functions of this client: the door adds
them to the session, carries out their calls, and sends the results.
"""

from __future__ import annotations

import anyio
import anyio.abc
import msgspec
from starlette.requests import HTTPConnection

from antiphon.cluster.door.call import CallClient, HostEvent, read
from antiphon.events.conversation import Response, ResponseCreated, ResponseDone
from antiphon.protocols.telephony.functions import session_of
from antiphon.protocols.telephony.stream import Call
from antiphon.transports.call_tools import CallTools
from antiphon.transports.leg import Leg


class _Function(msgspec.Struct):
    name: str = ""
    description: str = ""


class _Shown(msgspec.Struct):
    """What a door reads of a session."""

    instructions: str = ""
    tools: list[msgspec.Raw] = []


class TelephoneClient(CallClient):
    """One call as a DoorClient. Call `take` when its leg is known, and `serve` then.

    `key`, `address`: the API key with which hosts are asked, and the address of the caller. `session`: the requested
    session as JSON; null for that of the key, which may be a client secret. `instructions`: those of a session that has
    none.
    """

    def __init__(self, key: str, address: str, session: msgspec.Raw, call: Call, instructions: str) -> None:
        super().__init__(connection_of(key, address), None if bytes(session) == b"null" else session)
        self._call, self._instructions = call, instructions
        self._leg: Leg | None = None
        self._functions: CallTools | None = None
        # The names of those that the session has, unless an application has a function with the same name.
        self._own = set[str]()
        self._tasks: anyio.abc.TaskGroup | None = None

    def take(self, leg: Leg) -> None:
        """Set the leg of the call. Its functions are added to the session."""
        self._leg, self._functions = leg, CallTools(leg)
        self.attach(leg)
        # As it was requested: a host does not show the secrets of tool servers.
        self._add_functions(self._session if self._asked is None else self._asked)

    async def serve(self, ended: anyio.Event) -> None:
        """Carry out the functions that the model calls, until `ended` is set."""
        async with anyio.create_task_group() as self._tasks:
            await ended.wait()
            self._tasks.cancel_scope.cancel()

    def hang_up(self) -> None:
        super().hang_up()
        if self._leg:
            self._leg.end("hung_up")

    async def _show(self, frame: str | bytes) -> None:
        """Drop a frame: a telephone shows none."""

    def _tell(self, kind: str, response_id: str) -> None:
        """Drop an event: a telephone shows none."""

    # --- the session

    def _configuration(self) -> msgspec.Raw:
        # That of a client secret, if no other is requested.
        shown = msgspec.Raw(msgspec.json.encode(read(self._session, _Shown)))
        self._asked = session_of(shown if self._asked is None else self._asked, self._call, self._instructions)
        return super()._configuration()

    def _session_told(self, raw: msgspec.Raw, frame: str) -> str | None:
        shown = super()._session_told(raw, frame)
        self._add_functions(raw)
        return shown

    def _add_functions(self, session: msgspec.Raw) -> None:
        """Add the functions of the call to the session, unless it has functions with these names."""
        if not self._functions:
            return
        tools = read(session, _Shown).tools
        known = {found.name: found.description for found in (read(tool, _Function) for tool in tools)}
        self._own = {tool.name for tool in self._functions.tools if known.get(tool.name) == tool.description}
        added = [
            {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters}
            for tool in self._functions.tools
            if tool.name not in known
        ]
        if added:
            self._ask("session.update", session={"type": "realtime", "tools": [*tools, *added]})

    # --- the functions of the call

    def _follow(self, event: HostEvent) -> None:
        if event.type not in ("response.created", "response.done"):
            return
        response = Response(event.response.id, audio_output=True, voice=None, max_tokens=None)
        if event.type == "response.created":
            self._play(ResponseCreated(response))
            return
        self._play(ResponseDone(response))
        for item in event.response.output if event.response.status == "completed" else ():
            if self._tasks and item.type == "function_call" and item.name in self._own:
                self._tasks.start_soon(self._carry_out, item.call_id, item.name, item.arguments or "")

    async def _carry_out(self, call_id: str | None, name: str, arguments: str) -> None:
        assert self._leg
        assert self._functions
        num_cuts = self._leg.playback.num_cuts
        result = await self._functions.call("", name, arguments)
        output = {"type": "function_call_output", "call_id": call_id, "output": result.text}
        self._ask("conversation.item.create", item=output)
        if self._leg.playback.num_cuts == num_cuts:
            self._ask("response.create")
        # Otherwise the caller went on, and what they say is answered.


def connection_of(key: str, address: str) -> HTTPConnection:
    """Return a request of the caller, whose headers the hosts get. It has a key, unless that is empty."""
    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    client = (address, 0) if address else None
    return HTTPConnection({"type": "http", "scheme": "http", "path": "/", "headers": headers, "client": client})
