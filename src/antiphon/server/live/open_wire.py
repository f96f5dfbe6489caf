"""Opens the wire side of a realtime connection, from the server's settings, its models and the caller's voices."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from antiphon.contracts import TuningCaps
from antiphon.engine.schemas import check_schemas
from antiphon.errors import GrammarError, RemoteProtocolError
from antiphon.events.tools import JsonSchema, Tool
from antiphon.protocols.connection import Context, WireConnection
from antiphon.protocols.negotiation import RealtimeConnection
from antiphon.protocols.opening import Opening
from antiphon.protocols.realtime.input_fields import named_speakers, named_voices
from antiphon.protocols.realtime.items import take_tools
from antiphon.protocols.wire import Frame
from antiphon.server.credentials import Caller
from antiphon.server.mcp import check_server
from antiphon.server.state import ServerState
from antiphon.shares.threads import GRAMMAR_THREADS, THREADS, in_thread

Read = TypeVar("Read")
# Frames of at least this size are decoded in a thread: base64 and resampling of smaller ones take up to 3 ms.
LARGE_FRAME_BYTES = 256 << 10
# Frames with these fields are decoded in a thread too, because the schemas of tools are compiled. Also frames with such
# escapes, in which only a hostile client spells the names.
_TOOLS, _ESCAPES = ('"tools"', '"functions"'), re.compile(r"\\u00[67]")


def check_tools(tools: Sequence[Tool], param: str, field: str = "parameters") -> None:
    """Check that the schemas of tools can be enforced, each alone and all together. Blocks as `check_schemas` does.

    `param` is the path of the list of tools, and `field` is the path of the schema within a tool. Raises
    RemoteProtocolError, with the reason, if a schema cannot be enforced.
    """
    try:
        check_schemas([tool.parameters for tool in tools], together=True)
    except GrammarError as error:
        if error.index == len(tools):
            raise RemoteProtocolError("invalid_value", f"All tools together: {error}.", param) from None
        what = f"Invalid schema of tool '{tools[error.index].name}'"
        raise RemoteProtocolError("invalid_value", f"{what}: {error}.", f"{param}[{error.index}].{field}") from None


def check_fits(schema: JsonSchema, param: str) -> None:
    """Raise RemoteProtocolError, with the reason, if a schema cannot be compiled. Blocks as `check_schemas` does."""
    try:
        check_schemas([schema])
    except GrammarError as error:
        raise RemoteProtocolError("invalid_value", f"Invalid schema: {error}.", param) from None


def is_slow(data: str | bytes | msgspec.Raw) -> bool:
    """Return whether a message has to be read in a thread, because reading it may take more than a few milliseconds."""
    return len(data) >= LARGE_FRAME_BYTES or _may_have_tools(data)


async def read_slow(read: Callable[[], Read], data: str | bytes | msgspec.Raw) -> Read:
    """Return `read()`, called in a thread. `data` is the message that it reads, for which `is_slow` is true.

    A message with tools waits for one of GRAMMAR_THREADS, since its schemas are compiled. Raises what `read` raises.
    """
    return await in_thread(read, places=GRAMMAR_THREADS if _may_have_tools(data) else THREADS)


def _may_have_tools(data: str | bytes | msgspec.Raw) -> bool:
    text = data if isinstance(data, str) else bytes(data).decode(errors="replace")
    # Searching for single words takes a tenth of the time of one pattern. Nearly all messages are audio.
    return any(name in text for name in _TOOLS) or ("\\" in text and bool(_ESCAPES.search(text)))


async def open_wire(wire: WireConnection) -> list[Frame]:
    """Open the wire without blocking the event loop; return its first frames. Raises as `WireConnection.open`."""
    session = wire.opening.session
    return await read_slow(wire.open, session) if is_slow(session) else wire.open()


async def prepare_voices(state: ServerState, caller: Caller, data: str | bytes | msgspec.Raw) -> None:
    """Look up the voices and speakers that a message names, so that the wire finds them when it reads the message.

    Call it before the wire reads the message. Does not raise for an unusable voice: the wire raises later.
    """
    models = state.models
    if models is None:
        return
    for name in named_voices(data):
        await state.enrolled_voices.prepare(caller.key, name, state.uploaded_voices(caller), models)
    for name in named_speakers(data):
        await state.known_speakers.prepare(caller.key, name, state.remembered_speakers(caller), models.speaker_model)


def context_of(
    state: ServerState, caller: Caller, *, resume_token: str | None = None, autostart: bool = False
) -> Context:
    """Return the context of a caller's connection. `resume_token` and `autostart` are the fields of Context.

    Raises Refused while models load and while the server drains.
    """
    settings, models = state.settings, state.loaded()
    model, profile = models.for_conversations, models.required_transcriber.profile
    audio = settings.audio
    return Context(
        models=state.transcriber_names,
        now_s=time.time,
        steady_s=time.monotonic,
        conversation_models=state.conversation_names,
        voices=model.profile.voices if model else (),
        spoken_languages=models.synthesizer.profile.languages
        if models.synthesizer and not models.conversation_model
        else (),
        max_append_bytes=audio.max_append_bytes,
        session_s=settings.server.session_s,
        knows_language=profile.languages.__contains__,
        transcriber=profile,
        tells_voices=models.speaker_model is not None,
        enrolled_voices=partial(state.enrolled_voices.find, caller.key),
        known_voice=partial(state.known_speakers.find, caller.key),
        tuning_caps=TuningCaps(audio.max_audio_s, audio.max_prefix_tokens, audio.realtime_max_tokens),
        log_alias=state.log_alias,
        log_ignored=state.log_ignored,
        check_tools=check_tools if model and model.profile.keeps_to_schemas else take_tools,
        check_server=partial(check_server, state.tool_servers),
        resume_token=resume_token,
        autostart=autostart,
    )


async def checked_session(
    state: ServerState, caller: Caller, session: msgspec.Raw, *, beta: bool = False
) -> msgspec.Struct:
    """Return a session that a client configures before it opens it, as the client will see it. `session` is JSON with
    the fields of a `session.update`, with `beta` in the names of the beta.

    Raises RemoteProtocolError for an invalid field, and Refused as `context_of`.
    """
    await prepare_voices(state, caller, session)
    connection = RealtimeConnection(Opening(beta=beta, session=session), context_of(state, caller))
    await open_wire(connection)
    return connection.session()
