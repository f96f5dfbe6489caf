"""An asyncio client of the server's own protocols: conversations, captions, speech and video. Resumes broken sessions.

::

    async with Client("http://127.0.0.1:8000") as client, client.conversation() as talk:
        await talk.send_text("Hello!")
        async for event in talk:
            print(event)

`SyncClient` is its blocking counterpart, for programs without an event loop. docs/client.md is the tutorial.
"""

from antiphon.client.captions import CaptionWord, ClientCaptions
from antiphon.client.client import Client
from antiphon.client.conversation import ClientConversation
from antiphon.client.events import (
    AudioToPlay,
    ConversationEvent,
    Ducked,
    Heard,
    Interrupted,
    NothingSaid,
    Reconnected,
    ResponseBegins,
    ResponseEnds,
    ResponseWords,
    ServerError,
    ToolCalled,
    UserSaid,
    UserSpeaks,
    UserWords,
)
from antiphon.client.link import SessionEnded
from antiphon.client.network import pinned
from antiphon.client.speech import ClientSpeech, SpeechAudio
from antiphon.client.sync import SyncClient
from antiphon.client.video import ClientVideo

__all__ = [
    "AudioToPlay",
    "CaptionWord",
    "Client",
    "ClientCaptions",
    "ClientConversation",
    "ClientSpeech",
    "ClientVideo",
    "ConversationEvent",
    "Ducked",
    "Heard",
    "Interrupted",
    "NothingSaid",
    "Reconnected",
    "ResponseBegins",
    "ResponseEnds",
    "ResponseWords",
    "ServerError",
    "SessionEnded",
    "SpeechAudio",
    "SyncClient",
    "ToolCalled",
    "UserSaid",
    "UserSpeaks",
    "UserWords",
    "pinned",
]
