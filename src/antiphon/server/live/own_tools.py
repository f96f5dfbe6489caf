"""Functions of antiphon's own that a model may call (`--tool`): the time, and notes that are kept by API key."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from antiphon.contracts.language import ToolConnection
from antiphon.errors import LocalProtocolError, RemoteProtocolError, StoreError
from antiphon.events.tools import ANTIPHON, NamedServer, Tool, ToolResult
from antiphon.protocols.fields import decode
from antiphon.shares.threads import FILE_THREADS, in_thread
from antiphon.store.voices import NoteStore, StoredNote

# The label of these functions, as that of a tool server.
LABEL = ANTIPHON
# The longest name and the longest text of a note, in characters, and the most notes that one result has.
MAX_NAME_CHARS, MAX_TEXT_CHARS, MAX_RECALLED = 100, 2000, 100


_ABOUT = {"type": "string", "description": "What the note is about, in a few words."}
_ZONE = {"type": "string", "description": "IANA time zone, such as Europe/Berlin; by default the server's."}
_NOTE = {"about": _ABOUT, "text": {"type": "string", "description": "The note."}}
_TIME_SCHEMA = {"type": "object", "properties": {"timezone": _ZONE}, "required": []}
_NOTE_SCHEMA = {"type": "object", "properties": _NOTE, "required": ["about", "text"]}
_ABOUT_SCHEMA = {"type": "object", "properties": {"about": _ABOUT}, "required": ["about"]}
_NO_SCHEMA = {"type": "object", "properties": {}, "required": []}
TIME = Tool("get_time", "Tells the date and the time now.", _TIME_SCHEMA, LABEL, read_only=True)
REMEMBER = Tool(
    "remember",
    "Writes a note for later conversations. Replaces the note about the same thing.",
    _NOTE_SCHEMA,
    LABEL,
)
RECALL = Tool("recall", "Reads the notes of earlier conversations.", _NO_SCHEMA, LABEL, read_only=True)
FORGET = Tool("forget", "Deletes the note about something.", _ABOUT_SCHEMA, LABEL)
# The functions of each value of `--tool`.
TOOLS = {"time": (TIME,), "remember": (REMEMBER, RECALL, FORGET)}


class _Given(msgspec.Struct):
    """The arguments of all functions."""

    about: str = ""
    text: str = ""
    timezone: str = ""


class OwnTools:
    """The functions of one conversation, as ToolServers (contracts/language.py).

    - `names`: values of `--tool`.
    - `notes`: has the notes of the conversation's API key.
    - `clock`: returns Unix seconds.
    """

    def __init__(self, names: tuple[str, ...], notes: NoteStore, clock: Callable[[], float] = time.time) -> None:
        self._tools = tuple(tool for name in TOOLS if name in names for tool in TOOLS[name])
        self._notes = notes
        self._clock = clock

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The functions, in the order of TOOLS."""
        return self._tools

    def connection(self, server: NamedServer) -> ToolConnection:
        """Never called: sessions name servers only where there are MCP servers, which connect to them."""
        raise LocalProtocolError(f"{LABEL} connects to no tool server, so not to {server.label}")

    async def call(self, server: str, name: str, arguments: str) -> ToolResult:
        """Carry out a function and wait for its result, see ToolServers."""
        own = name.removeprefix(f"{LABEL}__")
        if own not in {tool.name for tool in self._tools}:
            return ToolResult(f"There is no function {name}.", "protocol_error")
        try:
            given = decode(arguments or "{}", _Given)
            text = await in_thread(partial(self._carry_out, own, given), places=FILE_THREADS)
        except RemoteProtocolError as error:
            return ToolResult(error.message, "tool_execution_error")
        except StoreError as error:
            return ToolResult(f"Not done: {error}.", "tool_execution_error")
        return ToolResult(text)

    def _carry_out(self, name: str, given: _Given) -> str:
        match name:
            case TIME.name:
                return self._time(given.timezone)
            case REMEMBER.name:
                text = _checked(given.text, "text", MAX_TEXT_CHARS)
                about = _checked(given.about, "about", MAX_NAME_CHARS)
                self._notes.add(StoredNote(about, text, int(self._clock())))
                return "The note is written."
            case RECALL.name:
                notes = self._notes.list()
                lines = [f"{note.name}: {note.text}" for note in notes[:MAX_RECALLED]]
                return "\n".join(lines) or "There are no notes."
            case _:
                is_deleted = self._notes.delete(_checked(given.about, "about", MAX_NAME_CHARS))
                return "The note is deleted." if is_deleted else "There is no such note."

    def _time(self, zone: str) -> str:
        try:
            now = datetime.fromtimestamp(self._clock(), ZoneInfo(zone)) if zone else None
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise RemoteProtocolError("invalid_value", f"There is no time zone {zone[:50]}.", "timezone") from None
        now = now or datetime.fromtimestamp(self._clock()).astimezone()
        return f"{now:%A}, {now.day} {now:%B %Y, %H:%M} ({now:%Z})"


def _checked(value: str, name: str, most: int) -> str:
    if not 0 < len(value.strip()) <= most:
        raise RemoteProtocolError("invalid_value", f"'{name}' has 1 to {most} characters.", name)
    return value.strip()
