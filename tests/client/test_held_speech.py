"""Speech streams that start again at another host: wherever they are cut off, the client gets each frame once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from antiphon.client.held_session import CannotResume, ClientFrame
from antiphon.client.held_speech import MAX_TEXT, HeldSpeech, resume_over
from antiphon.protocols.speech.fields import SpeechCatalog
from antiphon.protocols.speech.stream import SpeechDialect
from antiphon.sessions.speech.session import SpeechSession
from tests.protocols.test_speech import catalog
from tests.sessions.speech.scripted import Live, Scripted

CONFIG = {"type": "session.config", "response_format": "pcm", "stream_audio": True, "voice": "heart"}
CREATED = '{"type":"session.created","session_id":"s","resume_token":"t"}'


def message(kind: str, **fields: Any) -> str:
    return json.dumps({"type": kind, **fields}, separators=(",", ":"))


def said(*utterances: str) -> list[str]:
    """Return the messages that have these utterances spoken, a few letters at a time."""
    frames = []
    for text in utterances:
        frames += [message("input.text", text=text[at : at + 3]) for at in range(0, len(text), 3)]
        frames.append(message("input.done"))
    return frames


def host(given: Sequence[ClientFrame], synthesizer: Scripted, voices: SpeechCatalog) -> list[str | bytes]:
    """Return all frames of a host that gets these messages of a resumable stream."""

    async def main() -> list[str | bytes]:
        dialect, session = SpeechDialect(voices), SpeechSession(synthesizer)
        frames = []
        for each in given:
            received = dialect.feed(each)
            frames += received.answers
            for command in received.commands:
                session.handle(command)
        session.close()
        running = asyncio.create_task(session.run())
        while event := await session.next_event():
            frames += dialect.send(event)
        await running
        return [CREATED, *(frame.encode(seq) for seq, frame in enumerate(frames, 1))]

    return asyncio.run(main())


class Client:
    """A client of a door: what it has sent, and the frames that it has received."""

    def __init__(self, frames: Sequence[str], synthesizer: Scripted) -> None:
        self.held = HeldSpeech(hides_created=True)
        self.got: list[str | bytes] = []
        self._synthesizer = synthesizer
        for frame in frames:
            self.held.keep(frame)
        self._given = self._sent()
        self._frames = self._host(self._given)

    @property
    def rest(self) -> int:
        """The number of the host's frames that the client has not received."""
        return len(self._frames)

    def hear(self, num_frames: int) -> None:
        """Receive the next frames of the host."""
        for frame in self._frames[:num_frames]:
            if (given := self.held.receive(frame)) is not None:
                self.got.append(given)
        del self._frames[:num_frames]

    def lose_host(self) -> None:
        """Continue at another host."""
        opening = self.held.opening()
        created, *answers = self._host(opening)
        self.held.start_again(created, answers[0] if opening else None)
        assert len(answers) == bool(opening)
        self._frames = self._host([*opening, *self._sent()])[1 + len(answers) :]

    def _sent(self) -> list[ClientFrame]:
        return list(iter(self.held.next_frame, None))

    def _host(self, given: Sequence[ClientFrame]) -> list[str | bytes]:
        return host(given, self._synthesizer, catalog())


KINDS: dict[str, tuple[dict[str, Any], type[Scripted]]] = {
    "stream": (CONFIG, Scripted),
    "words": (CONFIG | {"word_timestamps": True}, Scripted),
    "files": (CONFIG | {"stream_audio": False, "response_format": "wav"}, Scripted),
    "whole": (CONFIG | {"split_granularity": "none"}, Live),
}


def joined(frames: Sequence[str | bytes]) -> list[str | bytes]:
    """Return the frames with neighbouring pieces of audio joined, since a host may divide them elsewhere."""
    found: list[str | bytes] = []
    for frame in frames:
        if isinstance(frame, bytes) and found and isinstance(found[-1], bytes):
            found[-1] += frame
        else:
            found.append(frame)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_wherever_a_host_is_lost_then_each_frame_comes_once(kind: str) -> None:
    config, synthesizer = KINDS[kind]
    frames = [json.dumps(config), *said("Ab cd. Ef gh.", "", "Ij.")]
    # A sentence that fails. A live text fails by its pieces, which another host gets joined.
    last = "Kl. Mn." if kind == "whole" else "Kl bad. Mn."
    frames += [json.dumps(config | {"voice": "emma"}), *said(last)]
    whole = Client(frames, synthesizer())
    num_frames = whole.rest
    whole.hear(num_frames)
    for first in range(num_frames + 1):
        cut = Client(frames, synthesizer())
        cut.hear(first)
        cut.lose_host()
        for _ in range(2):
            # The next hosts are lost after a part of the rest.
            cut.hear(cut.rest // 3)
            cut.lose_host()
        cut.hear(cut.rest)
        assert joined(cut.got) == joined(whole.got), first


def test_when_a_cancel_was_not_answered_then_the_next_host_answers_it() -> None:
    client = Client([json.dumps(CONFIG), *said("Ab. Cd."), message("input.cancel"), *said("Ef.")], Scripted())
    client.lose_host()
    client.hear(client.rest)
    events = [json.loads(frame) for frame in client.got if isinstance(frame, str)]
    assert [(e["utterance_index"], e.get("cancelled", False)) for e in events if e["type"] == "session.done"] == [
        (0, True),
        (1, False),
    ]


def test_text_is_sent_again_in_large_pieces_and_a_seed_joins_the_audio() -> None:
    text = "a" * MAX_TEXT + "b"
    client = Client([json.dumps(CONFIG), *(message("input.text", text=letter) for letter in text)], Scripted())
    opening = client.held.opening()
    seed = json.loads(opening[0])["seed"]
    assert 0 <= seed < 2**31
    client.held.start_again(CREATED, message("session.continued"))
    again = [json.loads(str(frame)) for frame in iter(client.held.next_frame, None)]
    assert [each["text"] for each in again] == ["a" * MAX_TEXT, "b"]
    given = HeldSpeech()
    given.keep(json.dumps(CONFIG | {"seed": 7}))
    assert json.loads(given.opening()[0])["seed"] == 7


def test_when_the_next_host_lacks_the_voice_then_the_stream_stays_as_it_was_for_another_host() -> None:
    class Elsewhere:
        """A connection to a host that has other voices."""

        def __init__(self) -> None:
            self.sent: list[ClientFrame] = []

        async def send(self, frame: str) -> None:
            self.sent.append(frame)

        async def recv(self) -> str | bytes:
            frames = await asyncio.to_thread(host, self.sent, Scripted(), replace(catalog(), voices=("other",)))
            return frames[1] if self.sent else frames[0]

    client = Client([json.dumps(CONFIG), *said("Ab. Cd.")], Scripted())
    client.hear(client.rest // 2)
    client.held.is_lost = True
    with pytest.raises(CannotResume, match="heart") as refused:
        asyncio.run(resume_over(client.held, Elsewhere()))
    assert not refused.value.is_final
    client.lose_host()
    client.hear(client.rest)
    whole = Client([json.dumps(CONFIG), *said("Ab. Cd.")], Scripted())
    whole.hear(whole.rest)
    assert joined(client.got) == joined(whole.got)


def test_when_no_configuration_was_sent_then_the_stream_begins_with_it() -> None:
    client = Client([], Scripted())
    client.lose_host()
    client.held.keep(json.dumps(CONFIG))
    assert json.loads(str(client.held.next_frame()))["voice"] == "heart"
