"""A client of the server's own wires, which resumes by itself: conversations, captions, speech, video.

    async with Client("http://127.0.0.1:8000") as client, client.conversation() as talk:
        await talk.send_text("Hello!")
        async for event in talk:
            print(event)

`SyncClient` has the same for programs without an event loop. docs/client.md is the tutorial.
"""

from antiphon.client.captions import ClientCaptions
from antiphon.client.client import Client
from antiphon.client.conversation import ClientConversation
from antiphon.client.events import (
    AnswerBegins,
    AnswerEnds,
    AnswerSound,
    AnswerWords,
    ConversationEvent,
    Heard,
    Interrupted,
    NothingSaid,
    Reconnected,
    ServerError,
    Softer,
    ToolCalled,
    UserSaid,
    UserSpeaks,
    UserWords,
)
from antiphon.client.link import SessionEnded
from antiphon.client.speech import ClientSpeech, SpeechSound
from antiphon.client.sync import SyncClient
from antiphon.client.video import ClientVideo

__all__ = [
    "AnswerBegins",
    "AnswerEnds",
    "AnswerSound",
    "AnswerWords",
    "Client",
    "ClientCaptions",
    "ClientConversation",
    "ClientSpeech",
    "ClientVideo",
    "ConversationEvent",
    "Heard",
    "Interrupted",
    "NothingSaid",
    "Reconnected",
    "ServerError",
    "SessionEnded",
    "Softer",
    "SpeechSound",
    "SyncClient",
    "ToolCalled",
    "UserSaid",
    "UserSpeaks",
    "UserWords",
]
