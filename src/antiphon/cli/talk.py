"""`antiphon talk`: a conversation by microphone and loudspeaker, with a live transcript on the screen."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TextIO

from antiphon.cli.embedded import Server
from antiphon.client import (
    AudioToPlay,
    Client,
    ClientConversation,
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
    SessionEnded,
    UserSaid,
    UserSpeaks,
    UserWords,
)
from antiphon.client.devices import INPUT_HZ, OUTPUT_HZ, HeardFile, sound_devices, sound_files
from antiphon.client.devices.playback import Playback
from antiphon.client.network import UNTRUSTED_HINT, is_untrusted, trusted
from antiphon.errors import RemoteError, SettingsError
from antiphon.settings import Settings

# A conversation with a recording ends after this time without an event or played audio, in seconds.
QUIET_S = 4.0


@dataclass(frozen=True, slots=True)
class TalkRequest:
    """The options of `antiphon talk`, from the command line."""

    # The model's system prompt; None: the server's default.
    instructions: str | None = None
    # The voice of the responses; None: the server's default.
    voice: str | None = None
    # The input device, by number or a part of its name (see sound_devices); None: the system's default.
    microphone: str | None = None
    # The output device, in the same form as `microphone`.
    loudspeaker: str | None = None
    # A recording to use instead of the microphone. The conversation ends after the answer to it.
    hear: str | None = None
    # With `hear`: a WAV file to write instead of playing.
    into: str | None = None
    # For https://: a PEM file with the certificates to trust; None: those that the system trusts.
    ca: str | None = None
    # For https://: the SHA-256 of the certificate to trust instead; None: any that is trusted.
    fingerprint: str | None = None

    def devices(self, playback: Playback) -> AbstractContextManager[AsyncIterator[bytes]]:
        """Return a context manager that plays `playback` and yields the microphone's audio."""
        if self.hear is not None:
            return sound_files(playback, self.hear, self.into)
        return sound_devices(playback, self.microphone, self.loudspeaker)


# Hints for the user when a conversation with a server ends, by the code of SessionEnded.
HINTS = {
    "connection_lost": "no server answers there, or the connection is lost (antiphon serve starts a server)",
    "invalid_api_key": "this server needs a valid key: --key KEY, or ANTIPHON_TALK_KEY",
}


async def run(settings: Settings, request: TalkRequest, url: str | None, key: str | None) -> None:
    """Talk with the server at `url`; None: start one for this conversation.

    Raises RemoteError if the session ends with a code in HINTS; otherwise what `talk`, `trusted` and Server raise.
    """
    if url:
        try:
            client = Client(url, key, ca=await asyncio.to_thread(trusted, url, request.ca, request.fingerprint))
        except ValueError as error:
            raise SettingsError(f"--url: {error}") from None
        async with client:
            try:
                await talk(client, request)
            except SessionEnded as ended:
                if hint := UNTRUSTED_HINT if is_untrusted(ended) else HINTS.get(ended.code):
                    raise RemoteError(f"{url}: {hint}") from ended
                raise
        return
    local = replace(settings, server=replace(settings.server, port=0))
    async with Server(settings=local) as server, server.client() as client:
        await talk(client, request)


async def talk(client: Client, request: TalkRequest, out: TextIO = sys.stdout) -> None:
    """Talk until the task is cancelled, or until the recording of `request.hear` is answered.

    Raises SessionEnded, SettingsError.
    """
    loop = asyncio.get_running_loop()
    acknowledged: asyncio.Queue[tuple[AudioToPlay, float]] = asyncio.Queue()
    playback = Playback(lambda piece, part: loop.call_soon_threadsafe(acknowledged.put_nowait, (piece, part)))
    # Open the devices before a session begins.
    with request.devices(playback) as microphone:
        conversation = client.conversation(
            instructions=request.instructions,
            voice=request.voice,
            rate_hz=INPUT_HZ,
            response_rate_hz=OUTPUT_HZ,
            acknowledges=True,
        )
        async with conversation:
            screen = Screen(out)
            if request.hear is None:
                screen.line("Speak, and interrupt as you like. Ctrl-C ends. Headphones are better than a loudspeaker.")
            tasks = [
                asyncio.create_task(_follow(conversation, playback, screen)),
                asyncio.create_task(_acknowledge(conversation, acknowledged)),
                asyncio.create_task(_hear(conversation, microphone)),
            ]
            if isinstance(microphone, HeardFile):
                tasks.append(asyncio.create_task(_until_quiet(microphone, playback, screen)))
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                screen.end_line()


async def _follow(conversation: ClientConversation, playback: Playback, screen: Screen) -> None:
    async for event in conversation:
        playback.follow(event)
        screen.show(event)


async def _acknowledge(
    conversation: ClientConversation, acknowledged: asyncio.Queue[tuple[AudioToPlay, float]]
) -> None:
    while True:
        piece, part = await acknowledged.get()
        await conversation.played(piece, part=part)


async def _hear(conversation: ClientConversation, microphone: AsyncIterator[bytes]) -> None:
    async for block in microphone:
        await conversation.send_audio(block)


async def _until_quiet(heard: HeardFile, playback: Playback, screen: Screen) -> None:
    """Wait until the recording is over and answered, the answer was played, and no event arrives for QUIET_S."""
    while True:
        await asyncio.sleep(0.1)
        if not (heard.is_over and playback.is_empty and screen.is_idle):
            screen.active_s = time.monotonic()
        elif time.monotonic() - screen.active_s > QUIET_S:
            return


class Screen:
    """The live transcript of both sides: a line for each turn."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._speaker = self._aside = ""
        # The monotonic time of the last event; and whether the last turn is over: it was answered, or had no words.
        self.active_s = time.monotonic()
        self.is_idle = True

    def show(self, event: ConversationEvent) -> None:
        """Show an event: words on the current line, other events on lines of their own."""
        self.active_s = time.monotonic()
        match event:
            case UserWords():
                self.is_idle = False
                self._say("you", event.text)
            case UserSaid():
                self.is_idle = False
                # Skip the text if its words were shown already.
                if self._speaker != "you":
                    self._say("you", event.text)
                self.end_line()
            case ResponseWords():
                self._say("antiphon", event.text)
            case ResponseEnds():
                # If the response was cut off, the turn that interrupted it still has to be answered.
                self.is_idle = self.is_idle or event.status != "cancelled"
                self.end_line(" -" if event.status == "cancelled" and self._speaker == "antiphon" else "")
            case NothingSaid():
                self.is_idle = True
            case Heard():
                # A later event may report more audio as heard, so only the last event is shown.
                self._aside = f"(of that answer, {event.until_ms / 1000:.1f} s were heard)\n"
            case Reconnected():
                self.line("(the connection broke and is restored)")
            case ServerError():
                self.line(f"(error {event.code}: {event.message})")
            case UserSpeaks() | ResponseBegins():
                self.is_idle = False
            case Interrupted() | Ducked() | AudioToPlay():
                pass

    def line(self, text: str) -> None:
        """Show the text on a line of its own."""
        self.end_line()
        self._out.write(f"{text}\n")
        self._out.flush()

    def end_line(self, mark: str = "") -> None:
        """End the current line, or show the remark about the previous one."""
        if self._speaker:
            self._out.write(f"{mark}\n")
        elif self._aside:
            self._out.write(self._aside)
            self._aside = ""
        self._out.flush()
        self._speaker = ""

    def _say(self, speaker: str, words: str) -> None:
        if self._speaker != speaker:
            self.end_line()
            self._out.write(f"{speaker}: ")
            self._speaker, words = speaker, words.lstrip()
        self._out.write(words)
        self._out.flush()
