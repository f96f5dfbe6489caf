"""Measures what a single caller gets from any server of the OpenAI Realtime API.

It measures the delay of words and answers, the word errors, whether a pause is mistaken for the end of a turn, and what
the history keeps of an interrupted answer. It runs one session after another in real time with real recordings, and
measures only what a client can see.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import websockets

from antiphon.admission.certificate import Kind, Part, SingleCallerFigures, Spread
from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.certify.clients import (
    CAPTIONS_PATH,
    CONVERSATION_PATH,
    ODD,
    SOUND,
    Chances,
    Turn,
    answered,
    captioned,
    captions_sessions,
    conversation_session,
)
from antiphon.certify.recordings import Recording, speech_begin_s
from antiphon.certify.search import percentile
from antiphon.certify.wire import (
    PATIENCE_S,
    Event,
    Events,
    Failed,
    Loudspeaker,
    Microphone,
    begin,
    connected,
    while_running,
)

# The kinds for which a single caller is measured.
SINGLE_CALLER_KINDS: tuple[Kind, ...] = ("captions", "conversation")
# A hesitation is a pause of HESITATION_S at the quietest place within the fractions MIDDLE of a recording.
HESITATION_S, MIDDLE = 1.0, (0.3, 0.7)
# The caller interrupts an answer after HEARD_S, and waits up to NOTICED_S for the server to report the interruption.
HEARD_S, NOTICED_S = 1.0, 4.0
# An answer that ends within SOON_S of the start of the interruption is too short to be interrupted.
SOON_S = 0.5
AFTER_FAILURE_S, TRIES = 2.0, 5
LONG_TOKENS = 160
LONG_ANSWERS = "You are a voice assistant. Tell what you know about what is said, in five or six long sentences."
T = TypeVar("T")
# Takes one turn, and returns its result; None if the turn was no valid measurement.
TakeTurn = Callable[[Any, Microphone, Events], Awaitable[T | None]]
WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
_WORDS = ("response.output_audio_transcript.delta", "response.audio_transcript.delta")


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return WORD.findall(text.lower().replace("’", "'"))


def num_word_errors(said: Sequence[str], heard: Sequence[str]) -> int:
    """Return the smallest number of substituted, missing and added words (the Levenshtein distance)."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        diagonal, row[0] = row[0], i
        for k, other in enumerate(heard, 1):
            diagonal, row[k] = row[k], min(row[k] + 1, row[k - 1] + 1, diagonal + (word != other))
    return row[-1]


def hesitating(recording: Recording) -> Recording:
    """Return the recording with a pause of HESITATION_S inserted at the quietest 40 ms of its middle."""
    frame = SAMPLE_RATE_HZ // 25
    end = int(recording.speech_end_s * SAMPLE_RATE_HZ)
    first = int(end * MIDDLE[0]) // frame
    last = max(first + 1, int(end * MIDDLE[1]) // frame)
    power = [float(np.square(recording.pcm[n * frame : (n + 1) * frame]).mean()) for n in range(first, last)]
    at = (first + int(np.argmin(power))) * frame + frame // 2
    silence = np.zeros(int(HESITATION_S * SAMPLE_RATE_HZ), np.float32)
    pcm = np.concatenate([recording.pcm[:at], silence, recording.pcm[at:]])
    return replace(recording, pcm=pcm, speech_end_s=recording.speech_end_s + HESITATION_S)


def spread(delays: Sequence[float | None]) -> Spread | None:
    """Summarize the delays of turns, where None is a failed turn. Returns None if there are no turns."""
    if not delays:
        return None
    good = [d for d in delays if d is not None]
    p50, p95 = (None if v is None else round(v, 3) for v in (percentile(good, 50), percentile(good, 95)))
    return Spread(len(delays), len(delays) - len(good), p50, p95)


def part(found: Sequence[bool]) -> Part | None:
    """Return how many of the values are true; None if there are no values."""
    return Part(sum(found), len(found), round(sum(found) / len(found), 3)) if found else None


@dataclass(frozen=True, slots=True)
class CutAnswer:
    """An answer that was interrupted.

    `noticed_s` is the delay from the true start of speech until the server reported it; None if it did not within
    NOTICED_S. `kept` is the fraction of the answer's words in the history; None if the server does not return it.
    `heard` is the fraction of the answer's audio that was played.
    """

    noticed_s: float | None
    kept: float | None
    heard: float


class SingleCaller:
    """Measures one server with one session at a time.

    `turns` is the number of turns of each sort. `say` is called with a line before each measurement. `turn_detection`
    is the type of turn detection that the sessions ask for.
    """

    def __init__(
        self,
        url: str,
        key: str,
        recordings: Sequence[Recording],
        turns: int,
        say: Callable[[str], None],
        turn_detection: str = "server_vad",
    ) -> None:
        self._url, self._key, self._turns, self._say = url.replace("http", "ws", 1), key, turns, say
        self._chances = Chances(recordings, random.Random(7))
        self._errors = set[str]()
        self._turn_detection = turn_detection

    async def measure(self, kinds: Collection[Kind] = SINGLE_CALLER_KINDS) -> SingleCallerFigures:
        """Measure these kinds. If the server lacks a feature, its error is in `errors`."""
        listened = await self._listen() if "captions" in kinds else []
        talked, hesitated, cuts = list[Turn](), list[bool](), list[CutAnswer]()
        if "conversation" in kinds:
            talked, hesitated, cuts = await self._talk(), await self._hesitate(), await self._speak_into()
        pairs = [(words_of(turn.said), words_of(turn.heard)) for turn in listened]
        said, wrong = sum(len(words) for words, _ in pairs), sum(num_word_errors(*pair) for pair in pairs)
        unheard = percentile([c.kept - c.heard for c in cuts if c.kept is not None], 50)
        return SingleCallerFigures(
            spread([t.first_words_s for t in listened]),
            spread([t.delay_s for t in listened]),
            Part(wrong, said, round(wrong / said, 4)) if said else None,
            spread([t.audible_s for t in talked]),
            part(hesitated),
            spread([c.noticed_s for c in cuts if c.noticed_s is not None]),
            part([c.noticed_s is None for c in cuts]),
            None if unheard is None else round(unheard, 3),
            tuple(sorted(self._errors | {t.failed for t in (*listened, *talked) if t.failed})),
        )

    async def _listen(self) -> list[Turn]:
        async def turn(socket: Any, microphone: Microphone, events: Events) -> Turn:
            recording = self._chances.recording()
            return await captioned(microphone.say(recording), recording, events)

        self._say("one caller: captions")
        found = list[Turn]()
        await self._turns_of(CAPTIONS_PATH, captions_sessions(), turn, found)
        return found

    async def _talk(self) -> list[Turn]:
        async def turn(socket: Any, microphone: Microphone, events: Events) -> Turn:
            recording = self._chances.recording()
            return await answered("conversation", socket, microphone.say(recording), recording, events)

        self._say("one caller: questions")
        return await self._converse(turn)

    async def _hesitate(self) -> list[bool]:
        async def turn(socket: Any, microphone: Microphone, events: Events) -> bool:
            return await _is_taken_over(microphone.say(hesitating(self._chances.recording())), events)

        self._say("one caller: questions with a pause")
        return await self._converse(turn)

    async def _converse(self, turn: TakeTurn[T]) -> list[T]:
        found = list[T]()
        session = conversation_session(turns=self._turn_detection)
        await self._turns_of(CONVERSATION_PATH, (session,), turn, found)
        return found

    async def _speak_into(self) -> list[CutAnswer]:
        async def turn(socket: Any, microphone: Microphone, events: Events) -> CutAnswer | None:
            return await _cut(socket, microphone, events, self._chances.recording(), self._chances.recording())

        self._say("one caller: answers that are spoken into")
        session = conversation_session(LONG_ANSWERS, LONG_TOKENS, self._turn_detection)
        found = list[CutAnswer]()
        for _ in range(self._turns):
            if not await self._turns_of(CONVERSATION_PATH, (session,), turn, found, turns=1):
                break
        return found

    async def _turns_of(
        self,
        path: str,
        sessions: Sequence[str],
        turn: TakeTurn[T],
        found: list[T],
        turns: int | None = None,
    ) -> bool:
        """Hold the first of these sessions that the server accepts, call `turn` in it `turns` times, and fill `found`.

        After a session breaks, a new one continues. A session that breaks before its first turn is tried TRIES times
        and then counts as a turn. Returns whether the server accepts such sessions at all.
        """
        done, wanted, tries = 0, self._turns if turns is None else turns, 0
        while done < wanted:
            before = done
            try:
                async with connected(self._url + path, self._key) as socket:
                    await begin(socket, *sessions)
                    microphone, events = Microphone(socket), Events(socket)

                    async def take() -> None:
                        nonlocal done
                        while done < wanted:
                            await asyncio.sleep(self._chances.pause_s())
                            events.forget()  # noqa: B023
                            done += 1
                            if (one := await turn(socket, microphone, events)) is not None:  # noqa: B023
                                found.append(one)

                    await while_running(take, microphone.run, events.run)
            except (OSError, websockets.WebSocketException, Failed, *ODD) as error:
                # Servers of other projects may send anything, or need a moment before they accept the next session.
                tries += 1
                if done == before and tries % TRIES:
                    await asyncio.sleep(AFTER_FAILURE_S)
                    continue
                self._errors.add(f"{type(error).__name__}: {error}"[:200])
                if not done:
                    # The server does not accept such sessions.
                    return False
                done += done == before
                await asyncio.sleep(AFTER_FAILURE_S)
        return True


async def _is_taken_over(end_s: float, events: Events) -> bool:
    """Return whether an answer became audible before the end of the question. Waits until the answer was played."""
    early, speaker = False, Loudspeaker()
    while True:
        try:
            at_s, event = await events.next(end_s + PATIENCE_S)
        except Failed:
            if early:
                # The early answer remains the only answer.
                return True
            raise
        if event.type in SOUND:
            early = early or at_s < end_s
            speaker.take(event, at_s)
        elif event.type == "input_audio_buffer.speech_started":
            speaker = Loudspeaker()
        elif event.type == "response.done" and speaker.begun_s is not None and at_s > end_s:
            await asyncio.sleep(max(0.0, speaker.heard_by_s - time.monotonic()))
            return early


async def _cut(
    socket: Any, microphone: Microphone, events: Events, question: Recording, interruption: Recording
) -> CutAnswer | None:
    """Ask, interrupt the answer, and query what the history keeps of it. Returns None if the answer was too short."""
    end_s = microphone.say(question)
    answer = _Answer()
    onset_s: float | None = None
    noticed_s: float | None = None
    while noticed_s is None:
        by_s = end_s + PATIENCE_S if onset_s is None else onset_s + NOTICED_S
        begun_s = answer.speaker.begun_s
        if onset_s is None and begun_s is not None:
            by_s = begun_s + HEARD_S
        try:
            at_s, event = await events.next(by_s)
        except Failed:
            if onset_s is not None:
                return CutAnswer(None, None, 1.0)
            if begun_s is None:
                raise
            onset_s = microphone.say(interruption) - interruption.speech_end_s + speech_begin_s(interruption.pcm)
            if answer.speaker.heard_by_s < onset_s + SOON_S:
                return None
            continue
        answer.take(event, at_s)
        is_cut = event.type == "input_audio_buffer.speech_started" or answer.is_cancelled
        if onset_s is None:
            if is_cut:
                # The question continued, so this was not its answer.
                answer = _Answer()
        elif is_cut and at_s >= onset_s:
            noticed_s = at_s - onset_s
    return await _kept(socket, events, answer, noticed_s)


async def _kept(socket: Any, events: Events, answer: _Answer, noticed_s: float) -> CutAnswer:
    """Report to the server how much of an answer was played, and query what the history has of it."""
    speaker, whole_s = answer.speaker, sum(answer.speaker.items.values())
    assert speaker.begun_s is not None
    played_s = min(time.monotonic() - speaker.begun_s, whole_s)
    truncate = {"item_id": answer.item_id, "content_index": 0, "audio_end_ms": int(played_s * 1000)}
    await socket.send(json.dumps({"type": "conversation.item.truncate", **truncate}))
    await socket.send(json.dumps({"type": "conversation.item.retrieve", "item_id": answer.item_id}))
    until_s = time.monotonic() + NOTICED_S
    kept: float | None = None
    try:
        while kept is None:
            at_s, event = await events.next(until_s)
            answer.take(event, at_s)
            if event.type == "conversation.item.retrieved" and event.item and event.item.id == answer.item_id:
                texts = [part.transcript or part.text or "" for part in event.item.content or []]
                kept = len(words_of(" ".join(texts))) / max(1, len(words_of(answer.text)))
    except Failed:
        # The server does not return items of its history.
        pass
    return CutAnswer(noticed_s, kept, played_s / whole_s)


class _Answer:
    """The received part of one answer: its sound, its text, and the id of its item."""

    def __init__(self) -> None:
        self.speaker, self.text, self.item_id, self.is_cancelled = Loudspeaker(), "", "", False

    def take(self, event: Event, at_s: float) -> None:
        if event.type in SOUND:
            self.speaker.take(event, at_s)
            self.item_id = event.item_id or self.item_id
        elif event.type in _WORDS:
            self.text += event.delta
        elif event.type == "response.done":
            self.is_cancelled = event.response is not None and event.response.status == "cancelled"


def lines_of(found: SingleCallerFigures) -> list[tuple[str, str]]:
    """Format the figures for people, as pairs of name and value."""

    def delay(one: Spread | None) -> str:
        if one is None:
            return "not reported"
        values = " / ".join("-" if v is None else f"{v:.2f}" for v in (one.p50_s, one.p95_s))
        return f"p50 / p95 {values} s, {one.turns} turns" + (f", {one.failed} failed" if one.failed else "")

    def counted(one: Part | None) -> str:
        return "not reported" if one is None or one.part is None else f"{one.count} of {one.of}, {100 * one.part:.1f} %"

    unheard = "not reported" if found.kept_unheard is None else f"{100 * found.kept_unheard:+.0f} %"
    return [
        ("first words", delay(found.first_words)),
        ("final transcript", delay(found.finals)),
        ("word errors", counted(found.word_errors)),
        ("voice to voice", delay(found.voice_to_voice)),
        ("pauses of 1 s taken over", counted(found.pauses_taken_over)),
        ("barge-in, until it is reported", delay(found.barge_in)),
        ("barge-ins not reported", counted(found.not_noticed)),
        ("kept of a cut answer beyond what was heard", unheard),
    ]
