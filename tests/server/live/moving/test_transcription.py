"""A transcription session is continued from each state in which its host can die: nothing is reported twice or lost."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import anyio
import msgspec
import numpy as np
import pytest

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import Transcriber, VoiceActivityDetector
from antiphon.errors import RemoteProtocolError
from antiphon.events.transcription import (
    AppendAudio,
    ClearAudio,
    CommitAudio,
    ServerVad,
    SpeechStarted,
    SpeechStopped,
    TranscriptDelta,
    TranscriptDone,
    TranscriptionCommand,
    TranscriptionConfig,
    TranscriptionEvent,
    TurnCleared,
    TurnCommitted,
)
from antiphon.server.live.moving import client_words
from antiphon.server.live.moving.client_words import ClientWords, new_key, with_client_words
from antiphon.server.live.moving.resume_point import Progress, ResumePoint, check_counts
from antiphon.server.live.moving.tail import chunk_of, parts_of
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.sessions.transcription.state import ContinuedTranscription
from antiphon.store.sessions import TailChunk
from tests.scripted import OTHERS, ScriptedDetector, ScriptedTranscriber, ScriptedVoices, heard, speech

VAD = ServerVad(silence_duration_ms=300)
PIECE = SAMPLE_RATE_HZ // 10
POINTS = msgspec.json.Decoder(ResumePoint)
Message = Sequence[TranscriptionCommand]


@dataclass
class Stored:
    """What a store has after an event: the resume point as JSON, the tail, and the number of events until then. `words`
    is what the client has kept.
    """

    point: bytes
    tail: tuple[TailChunk, ...]
    num_events: int
    words: str = ""


@dataclass
class SessionHost:
    """One host of a session, which stores the session's state before it reports an event, unless the client keeps the
    event's words.
    """

    config: TranscriptionConfig
    stored: Stored | None = None
    transcriber: Transcriber = field(default_factory=ScriptedTranscriber)
    detector: VoiceActivityDetector = field(default_factory=ScriptedDetector)
    speaker_model: ScriptedVoices | None = None
    # Seconds between two messages.
    pace_s: float = 0.0
    keeps_words: bool = False
    events: list[TranscriptionEvent] = field(default_factory=list)
    states: list[Stored] = field(default_factory=list)
    # Whether decodes wait until all audio was heard, and whether the session was silent then.
    decodes_late: bool = False
    silences: list[bool] = field(default_factory=list)
    # The state after each message, as JSON.
    between: list[bytes] = field(default_factory=list)

    async def run(self, messages: Sequence[Message]) -> None:
        """Handle all messages, as far as the stored state does not cover them, then let the session finish."""
        point = POINTS.decode(self.stored.point) if self.stored else ResumePoint()
        check_counts(point)
        words = ClientWords(point.words_key or new_key())
        kept = self.stored.words if self.stored else ""
        point = with_client_words(point, kept)
        tail = list(self.stored.tail) if self.stored else []
        inbox = Inbox(120.0)
        progress = Progress(inbox, point)
        continued = None
        if point.transcription:
            from_sample = round(point.from_ms * SAMPLE_RATE_HZ / 1000)
            continued = ContinuedTranscription(point.transcription, parts_of(tail), from_sample)
        session: TranscriptionSession

        stored = self.stored

        async def emit(event: TranscriptionEvent) -> None:
            nonlocal kept, stored
            self.events.append(event)
            given = words.for_client(event.turn, session.continuing) if isinstance(event, TranscriptDelta) else None
            if self.keeps_words and given and stored:
                kept = given
                stored = replace(stored, num_events=len(self.events), words=kept)
            else:
                if parts := session.continuing.take_parts():
                    tail.append(chunk_of(parts))
                now = progress.now_in(session)
                assert now.transcription
                words.wrote(now.transcription)
                now.words_key = words.key
                stored = Stored(msgspec.json.encode(now), tuple(tail), len(self.events), kept)
            self.states.append(stored)
            await anyio.lowlevel.checkpoint()

        async def note_silence(ready: anyio.Event) -> None:
            while not inbox.is_worked_off:
                await anyio.lowlevel.checkpoint()
            self.silences.append(session.is_silent)
            ready.set()

        def late(_: object) -> anyio.Event:
            ready = anyio.Event()
            group.start_soon(note_silence, ready)
            return ready

        if self.decodes_late and isinstance(self.transcriber, ScriptedTranscriber):
            self.transcriber.gate = late
        session = TranscriptionSession(
            *(self.config, self.transcriber, self.detector, inbox, emit),
            speaker_model=self.speaker_model,
            keeps_state=True,
            continued=continued,
        )
        async with anyio.create_task_group() as group:
            group.start_soon(session.run)
            for number, message in enumerate(messages[point.received :], point.received + 1):
                if progress.is_applied(number):
                    continue
                commands = progress.unheard(message)
                for command in commands:
                    await inbox.put(command)
                progress.took(number, commands)
                while not inbox.is_worked_off:
                    await anyio.lowlevel.checkpoint()
                self.between.append(msgspec.json.encode(progress.now_in(session)))
                await anyio.sleep(self.pace_s)
                # Decoding goes on between two messages.
                for _ in range(4):
                    await anyio.lowlevel.checkpoint()
            inbox.close()


def pieces(pcm: Pcm) -> list[Message]:
    return [[AppendAudio(pcm[at : at + PIECE])] for at in range(0, len(pcm), PIECE)]


def two_turns_and_a_noise() -> list[Message]:
    """Return a long turn with a pause, a turn that follows it closely, and a short turn."""
    silence = np.zeros(SAMPLE_RATE_HZ, np.float32)
    parts = [silence, speech(1, 5, 5), speech(6, 3, 14), speech(9, 2, 40), speech(11, 1, 60)]
    return pieces(np.concatenate(parts))


def committed_turns() -> list[Message]:
    """Return turns that the client ends: with pauses in them, cleared, empty, and committed in their middle."""
    commit: Message = [CommitAudio()]
    return [
        *pieces(speech(1, 4, 40)),
        *pieces(speech(5, 2, 4)),
        commit,
        *pieces(speech(7, 2, 3)),
        [ClearAudio()],
        *pieces(speech(9, 12, 20)),
        commit,
        commit,
        *pieces(speech(21, 2)),
        commit,
    ]


def a_long_turn() -> list[Message]:
    """Return a turn of many windows, some of which are cut because they are too long."""
    return [*pieces(np.concatenate([speech(1, 30, 20), speech(31, 3, 20), speech(34, 26)])), [CommitAudio()]]


def in_short(events: Sequence[TranscriptionEvent]) -> list[object]:
    """Return the events without what depends on the moment of a partial: deltas are joined by turn."""
    found: list[object] = []
    deltas: dict[int, str] = {}
    for event in events:
        match event:
            case TranscriptDelta(turn, delta):
                deltas[turn] = deltas.get(turn, "") + delta
            case TranscriptDone(turn, transcript, streamed):
                assert deltas.pop(turn, "") == streamed
                found.append(("done", turn, transcript, streamed, [w.text for w in event.words]))
            case SpeechStarted() | SpeechStopped() | TurnCommitted() | TurnCleared():
                found.append(event)
    assert not deltas
    return found


@pytest.mark.parametrize(("word_times", "keeps_words"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(
    ("messages", "vad", "every"),
    [(two_turns_and_a_noise(), VAD, 1), (committed_turns(), None, 1), (a_long_turn(), None, 12)],
    ids=["server VAD", "commits", "a long turn"],
)
def test_from_whatever_state_a_session_is_continued_the_client_gets_each_event_once(
    messages: list[Message], vad: ServerVad | None, every: int, word_times: bool, keeps_words: bool
) -> None:
    config = TranscriptionConfig(vad=vad, word_times=word_times)

    async def main() -> None:
        whole = SessionHost(config, keeps_words=keeps_words)
        await whole.run(messages)
        expected = in_short(whole.events)
        assert len(whole.states) > 20
        assert any(stored.words for stored in whole.states) is keeps_words
        for stored in whole.states[::every]:
            transcriber = ScriptedTranscriber()
            again = SessionHost(config, stored, transcriber, keeps_words=keeps_words)
            await again.run(messages)
            # Words that were sent are the prefix of a partial only if it has their audio.
            assert all(set(w.prefix) <= {n for n, *_ in heard(w.pcm)} for w in transcriber.windows if not w.final)
            seen = [*whole.events[: stored.num_events], *again.events]
            order = [*expected]
            assert sorted(map(str, in_short(seen))) == sorted(map(str, order)), stored.num_events
            # A third host continues from the state in the middle of what the second host has done.
            if again.states:
                middle = again.states[len(again.states) // 2]
                third = SessionHost(config, middle, keeps_words=keeps_words)
                await third.run(messages)
                seen = [*seen[: stored.num_events + middle.num_events], *third.events]
                assert sorted(map(str, in_short(seen))) == sorted(map(str, order)), stored.num_events

    anyio.run(main)


def test_a_label_stands_for_one_voice_also_at_the_next_host() -> None:
    config = TranscriptionConfig(vad=VAD, speaker_labels=True)
    messages = pieces(np.concatenate([speech(first, 5, 60) for first in (1, OTHERS, 11, OTHERS + 10)]))

    def labels(events: Sequence[TranscriptionEvent]) -> list[str]:
        return [event.speaker_label for event in events if isinstance(event, TranscriptDone)]

    async def main() -> None:
        whole = SessionHost(config, speaker_model=ScriptedVoices())
        await whole.run(messages)
        assert labels(whole.events) == ["A", "B", "A", "B"]
        # The next host knows no voices, and gives them labels that nobody has had.
        stored = next(s for s in whole.states if len(labels(whole.events[: s.num_events])) == 2)
        again = SessionHost(config, stored, speaker_model=ScriptedVoices())
        await again.run(messages)
        assert labels(again.events) == ["C", "D"]

    anyio.run(main)


def test_a_host_that_dies_before_it_has_heard_the_audio_again_leaves_the_state_that_it_got() -> None:
    config, messages = TranscriptionConfig(vad=VAD), two_turns_and_a_noise()

    async def main() -> None:
        whole = SessionHost(config)
        await whole.run(messages)
        stored = next(s for s in whole.states if POINTS.decode(s.point).transcription.sent)  # type: ignore[union-attr]
        again = SessionHost(config, stored)
        await again.run(messages)
        # After the first message that is sent again.
        assert POINTS.decode(again.between[0]).transcription == POINTS.decode(stored.point).transcription
        third = SessionHost(config, replace(stored, point=again.between[0]))
        await third.run(messages)
        seen = [*whole.events[: stored.num_events], *third.events]
        assert sorted(map(str, in_short(seen))) == sorted(map(str, in_short(whole.events)))

    anyio.run(main)


def test_a_session_is_not_silent_until_the_turns_of_the_last_host_have_their_transcripts() -> None:
    """A drain would release it before."""
    config = TranscriptionConfig(vad=None, partials=False)
    messages: list[Message] = [*pieces(speech(1, 3)), [CommitAudio()]]

    async def main() -> None:
        whole = SessionHost(config)
        await whole.run(messages)
        stored = next(
            s for s in whole.states if any(isinstance(e, TurnCommitted) for e in whole.events[: s.num_events])
        )
        again = SessionHost(config, stored, decodes_late=True)
        await again.run(messages)
        # Only the final of the turn is decoded here.
        assert again.silences == [False]
        assert isinstance(again.events[-1], TranscriptDone)

    anyio.run(main)


@pytest.mark.parametrize("moved_ms", [-3_700_000.0, 3_700_000.0])
def test_a_state_that_lies_far_from_the_audio_that_is_sent_again_is_refused(moved_ms: float) -> None:
    """A damaged row would make the next host wait for hours of audio, or for none."""
    host = SessionHost(TranscriptionConfig(vad=VAD))
    anyio.run(host.run, pieces(speech(1, 5, 5)))
    point = POINTS.decode(host.states[-1].point)
    check_counts(point)
    point.from_ms = max(0.0, point.from_ms + moved_ms)
    if moved_ms < 0:
        assert point.transcription
        far = point.transcription.segmenter._replace(now=round(-moved_ms / 1000 * SAMPLE_RATE_HZ))
        point.transcription = replace(point.transcription, segmenter=far)
    with pytest.raises(RemoteProtocolError, match="damaged"):
        check_counts(point)


def kept_words() -> tuple[SessionHost, list[Stored]]:
    """Return a host of a turn, and its states in which the client has more words than the store."""
    host = SessionHost(TranscriptionConfig(vad=VAD), keeps_words=True)
    anyio.run(host.run, pieces(speech(1, 12, 60)))
    points = [POINTS.decode(stored.point) for stored in host.states]
    found = [s for s, p in zip(host.states, points, strict=True) if with_client_words(p, s.words) is not p]
    assert len(found) > 2
    return host, found


def test_words_that_the_client_keeps_are_taken_if_a_host_of_the_session_has_signed_them() -> None:
    (_, states), (_, of_others) = kept_words(), kept_words()
    point = POINTS.decode(states[-1].point)
    taken = with_client_words(point, states[-1].words)
    assert point.transcription
    assert taken.transcription
    stored, more = point.transcription.sent, taken.transcription.sent
    assert more[: len(stored)] == stored
    assert len(more) > len(stored)
    forged = states[-1].words[:-4] + "AAAA"
    for wrong in ("", "x", "====", forged, of_others[-1].words, b64encode(b"short").decode()):
        assert with_client_words(point, wrong) is point
    # A row whose client keeps no words takes none, and neither does one that has more words or another window.
    assert with_client_words(msgspec.structs.replace(point, words_key=""), states[-1].words).transcription == (
        point.transcription
    )
    assert with_client_words(taken, states[0].words) is taken
    other = msgspec.structs.replace(point, transcription=replace(point.transcription, window=99))
    assert with_client_words(other, states[-1].words) is other


def test_words_are_stored_if_they_are_too_many_for_the_client_or_of_another_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, states = kept_words()
    num_rows = len({stored.point for stored in states})
    with monkeypatch.context() as patch:
        patch.setattr(client_words, "MAX_RESUME_WORDS", 60)
        host = SessionHost(TranscriptionConfig(vad=VAD), keeps_words=True)
        anyio.run(host.run, pieces(speech(1, 12, 60)))
    assert len({stored.point for stored in host.states}) > num_rows
    assert all(len(stored.words) <= 60 for stored in host.states)
    words = ClientWords(new_key())
    state = POINTS.decode(states[0].point).transcription
    assert state
    words.wrote(state)
    later = SimpleNamespace(sent=(state.window, (*state.sent, state.sent[-1]._replace(text=" more")), 0))
    turn = state.sent[-1].turn
    assert words.for_client(turn, cast(Any, later))
    assert words.for_client(turn + 1, cast(Any, later)) is None
    window, *more = later.sent
    later.sent = (window + 1, *more)
    assert words.for_client(turn, cast(Any, later)) is None
    # The row has no words of the window yet, so that the next host would not take those of the client.
    words.wrote(replace(state, sent=()))
    later.sent = (window, *more)
    assert words.for_client(turn, cast(Any, later)) is None
