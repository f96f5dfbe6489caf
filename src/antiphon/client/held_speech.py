"""The client's side of a speech stream that outlives its host. Our client uses it, and so does a door.

A host keeps nothing of a speech stream for another host. All of it is here: the client's text that is not spoken yet,
and how much of its audio has arrived. When a host is lost, the stream starts again at another host, at the sentence and
the byte at which the audio broke off (`session.continue`). The audio joins, because each configuration has a seed: with
the same seed and text, each host makes the same audio. This module does no I/O.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from antiphon.client.held_session import CannotResume, ClientFrame, HeldSession, fields_of, message

PATH = "/v1/audio/speech/stream"
# Prefix of the server's error about a sentence that it could not speak. The server continues with the next sentence.
OF_A_SENTENCE = "Generation failed"
# Characters of text in one message when text is sent again.
MAX_TEXT = 16_000
# Seeds are below this number.
MAX_SEED = 1 << 31


@dataclass(frozen=True, slots=True)
class _Entry:
    """A message of the client about an utterance that is not done: a text, or any other message as a frame. A
    configuration is about the next utterance.
    """

    utterance: int
    kind: str
    value: str


class HeldSpeech(HeldSession):
    """The resuming side of one speech stream.

    Args:
        hides_created: Whether the client does not get `session.created`, because it did not ask for it.
    """

    starts_again = True

    def __init__(self, *, hides_created: bool = False) -> None:
        super().__init__()
        self._hides_created = hides_created
        # The configuration of the utterances before those in `_entries`; "" if there is none.
        self._config = ""
        self._entries: deque[_Entry] = deque()
        # The number of utterances that the client has begun, and whether the last one may get more text.
        self._num_utterances, self._is_open = 0, False
        # The sentence that arrives next, or arrives now: its utterance, its number, and how much of it has arrived.
        self._utterance = self._sentence = self._num_bytes = self._num_chunks = 0
        # The events about this sentence that have arrived, and those that the next host sends again.
        self._seen, self._again = set[str](), set[str]()
        # The frames that another host was sent first, and the number of configurations in `_entries` that they replace.
        self._opening, self._num_replaced = list[str](), 0

    # --- from the client ----------------------------------------------------------------------------------------------

    def keep(self, frame: ClientFrame) -> None:
        """Add a frame of the client. A configuration without a seed gets one."""
        fields = fields_of(frame)
        kind = fields.get("type")
        if kind == "session.config" and fields.get("seed") is None:
            frame = message(**fields, **({} if "seed" in fields else {"seed": random.randrange(MAX_SEED)}))
        super().keep(frame)
        sent = frame if isinstance(frame, str) else frame.decode(errors="replace")
        match kind:
            case "session.config" if not self._is_open:
                self._entries.append(_Entry(self._num_utterances, "config", sent))
            case "input.text" if isinstance(text := fields.get("text"), str) and text:
                self._begin()
                self._entries.append(_Entry(self._num_utterances - 1, "text", text))
            case "input.done":
                self._begin()
                self._entries.append(_Entry(self._num_utterances - 1, "", sent))
                self._is_open = False
            case "input.cancel" | "session.close":
                self._entries.append(_Entry(self._num_utterances - 1, "", sent))
                self._is_open = False

    def _begin(self) -> None:
        if not self._is_open:
            self._num_utterances, self._is_open = self._num_utterances + 1, True

    # --- from the host ------------------------------------------------------------------------------------------------

    def receive(self, frame: str | bytes) -> str | bytes | None:
        """Count a frame of the host, and return the frame for the client; None if there is nothing for the client."""
        given = super().receive(frame)
        if isinstance(given, bytes):
            self._num_bytes += len(given)
            return given
        return given if given is not None and self._is_for_client(given) else None

    def _is_for_client(self, frame: str) -> bool:
        """Follow an event, and return whether the client gets it."""
        event = fields_of(frame)
        match event.get("type"):
            case "session.created":
                return not self._hides_created
            case "audio.start":
                self._utterance, self._sentence = event["utterance_index"], event["sentence_index"]
                return self._is_new("start")
            case "audio.chunk" if event["timestamps"] is not None:
                return self._is_new("times")
            case "audio.chunk":
                audio = event["audio_b64"]
                self._num_bytes += len(audio) * 3 // 4 - audio.count("=")
                self._num_chunks = event["chunk_id"] + 1
            case "error" if str(event.get("message")).startswith(OF_A_SENTENCE):
                return self._is_new("error")
            case "audio.done":
                self._at(event["utterance_index"], event["sentence_index"] + 1)
            case "session.done":
                done = event["utterance_index"]
                self._at(done + 1, 0)
                while self._entries and self._entries[0].utterance <= done:
                    gone = self._entries.popleft()
                    self._config = gone.value if gone.kind == "config" else self._config
        return True

    def _is_new(self, kind: str) -> bool:
        """Note an event about the sentence, and return whether it did not come from an earlier host."""
        is_new = kind not in self._again
        self._again.discard(kind)
        self._seen.add(kind)
        return is_new

    def _at(self, utterance: int, sentence: int) -> None:
        self._utterance, self._sentence, self._num_bytes, self._num_chunks = utterance, sentence, 0, 0
        self._seen.clear()

    # --- when the host is lost ----------------------------------------------------------------------------------------

    def opening(self) -> list[str]:
        """Return the first frames for another host: the configuration, and where the stream continues.

        Empty if the client has not configured the stream. Otherwise the host answers with `session.continued`.
        """
        configs, _ = self._divided()
        config = configs[-1] if configs else self._config
        where = {"utterance_index": self._utterance, "sentence_index": self._sentence}
        amount = {"num_bytes": self._num_bytes, "num_chunks": self._num_chunks}
        self._opening = [config, message(type="session.continue", **where, **amount)] if config else []
        self._num_replaced = len(configs)
        return self._opening

    def start_again(self, created: str | bytes, answer: str | bytes | None) -> None:
        """Continue at another host, which was sent `opening`. Queues the text that is not spoken yet.

        Args:
            created: The host's first frame.
            answer: Its answer to `opening`; None if that was empty.

        Raises:
            CannotResume: The host refuses the configuration, for example because it does not have the voice.
        """
        event = fields_of(answer) if answer is not None else {"type": "session.continued"}
        if event.get("type") != "session.continued" or "resume_token" not in fields_of(created):
            raise CannotResume("refused", str(event.get("message") or event.get("type")))
        configs, frames = self._divided()
        self.reset([*self._opening, *configs[self._num_replaced :], *frames], num_sent=len(self._opening))
        super().receive(created)
        if answer is not None:
            super().receive(answer)
        self._again, self.is_lost = set(self._seen), False

    def _divided(self) -> tuple[list[str], list[str]]:
        """Return the configurations before the first utterance that is not done, and the frames after them."""
        configs, frames, text = list[str](), list[str](), ""
        for entry in self._entries:
            if entry.kind == "text" and len(text) + len(entry.value) <= MAX_TEXT:
                text += entry.value
                continue
            frames += [_input(text)] if text else []
            text = entry.value if entry.kind == "text" else ""
            if entry.kind == "config" and not frames:
                configs.append(entry.value)
            elif entry.kind != "text":
                frames.append(entry.value)
        return configs, frames + ([_input(text)] if text else [])


def held_for(path: str, *, hides_created: bool = False) -> HeldSession:
    """Return the resuming side of a new session at an endpoint. For `hides_created` see HeldSpeech."""
    return HeldSpeech(hides_created=hides_created) if path.endswith(PATH) else HeldSession()


class Socket(Protocol):
    """A WebSocket to a host, as far as `resume_over` uses it."""

    async def send(self, message: str, /) -> None:
        """Send a text frame."""
        ...

    async def recv(self) -> str | bytes:
        """Wait for the next frame."""
        ...


async def resume_over(held: HeldSession, socket: Socket) -> str | bytes:
    """Resume a session over a new connection to a host, or start it again if it `is_lost`. Returns the first frame.

    Raises CannotResume, and what the socket raises.
    """
    if not isinstance(held, HeldSpeech) or not held.is_lost:
        await socket.send(held.resume_request())
        held.resumed(answer := await socket.recv())
        return answer
    created = await socket.recv()
    opening = held.opening()
    for frame in opening:
        await socket.send(frame)
    held.start_again(created, await socket.recv() if opening else None)
    return created


def _input(text: str) -> str:
    return message(type="input.text", text=text)
