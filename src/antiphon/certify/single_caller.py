"""What one caller alone gets from a server, whosever it is: how soon words and answers come, what is heard wrongly,
whether a pause is waited for, and what becomes of an answer that is cut.

One session after another of the OpenAI Realtime API, in real time, with real recordings. Nothing but what a client can
see is measured.
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

# What one caller is measured at.
SINGLE_CALLER_KINDS: tuple[Kind, ...] = ("captions", "conversation")
# The pause of a hesitation, and the part of a recording in which the quietest place for it is looked for.
HESITATION_S, MIDDLE = 1.0, (0.3, 0.7)
# An answer is heard for so long before somebody speaks into it, and so long is waited for that to be noticed.
HEARD_S, NOTICED_S = 1.0, 4.0
# An answer that would have been heard to its end so soon after that is not cut.
SOON_S = 0.5
AFTER_FAILURE_S, TRIES = 2.0, 5
LONG_TOKENS = 160
LONG_ANSWERS = "You are a voice assistant. Tell what you know about what is said, in five or six long sentences."
T = TypeVar("T")
# Takes one turn; None where nothing can be said of it.
TakeTurn = Callable[[Any, Microphone, Events], Awaitable[T | None]]
WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
_WORDS = ("response.output_audio_transcript.delta", "response.audio_transcript.delta")


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return WORD.findall(text.lower().replace("’", "'"))


def num_word_errors(said: Sequence[str], heard: Sequence[str]) -> int:
    """Return the fewest words to substitute, remove and add that make one the other (Levenshtein's distance)."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        diagonal, row[0] = row[0], i
        for k, other in enumerate(heard, 1):
            diagonal, row[k] = row[k], min(row[k] + 1, row[k - 1] + 1, diagonal + (word != other))
    return row[-1]


def hesitating(recording: Recording) -> Recording:
    """Return the recording with a pause of HESITATION_S at the quietest 40 ms of its middle."""
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
    """Sum up the delays of turns; None for one that failed. None where there was no turn."""
    if not delays:
        return None
    good = [d for d in delays if d is not None]
    p50, p95 = (None if v is None else round(v, 3) for v in (percentile(good, 50), percentile(good, 95)))
    return Spread(len(delays), len(delays) - len(good), p50, p95)


def part(found: Sequence[bool]) -> Part | None:
    """Count what is true; None of nothing."""
    return Part(sum(found), len(found), round(sum(found) / len(found), 3)) if found else None


@dataclass(frozen=True, slots=True)
class CutAnswer:
    """An answer that was spoken into. `noticed_s`: after the true beginning of speech; None: not told in NOTICED_S.

    `kept`: the part of its words that the history has; None where the server does not tell. `heard`: of its sound.
    """

    noticed_s: float | None
    kept: float | None
    heard: float


class SingleCaller:
    """Measures one server with one session at a time. `turns`: of each kind of turn. `say`: told what is being done.
    `turn_detection`: how the server is to find the ends of turns.
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
        """Do all of these kinds that the server can do; what it cannot is told in `errors`."""
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
        """Hold the first of these sessions that the server takes, and call `turn` in it, `turns` times. What it returns
        is added to `found`.

        One that breaks counts as a turn, unless it did so before its first: then it is tried TRIES times. Another one
        goes on. Returns whether there is any use in asking for another such session.
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
                # Another server may send anything, and may need a moment to be free for the next session.
                tries += 1
                if done == before and tries % TRIES:
                    await asyncio.sleep(AFTER_FAILURE_S)
                    continue
                self._errors.add(f"{type(error).__name__}: {error}"[:200])
                if not done:
                    # The server takes no such session at all.
                    return False
                done += done == before
                await asyncio.sleep(AFTER_FAILURE_S)
        return True


async def _is_taken_over(end_s: float, events: Events) -> bool:
    """Whether an answer began to sound before a question had ended. Returns once its answer has been heard."""
    early, speaker = False, Loudspeaker()
    while True:
        try:
            at_s, event = await events.next(end_s + PATIENCE_S)
        except Failed:
            if early:
                # That was its only answer.
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
    """Ask, speak into the answer, and ask what is kept of it. None where the answer was too short to be cut."""
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
                # The question went on: this was not its answer.
                answer = _Answer()
        elif is_cut and at_s >= onset_s:
            noticed_s = at_s - onset_s
    return await _kept(socket, events, answer, noticed_s)


async def _kept(socket: Any, events: Events, answer: _Answer, noticed_s: float) -> CutAnswer:
    """Tell the server how much of an answer was heard, and ask what the history has of it."""
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
        # The server tells nothing of its history.
        pass
    return CutAnswer(noticed_s, kept, played_s / whole_s)


class _Answer:
    """What has come of one answer: its sound, its text, the id of its item."""

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
    """What was measured, for people: a name and a value each."""

    def delay(one: Spread | None) -> str:
        if one is None:
            return "not told"
        values = " / ".join("-" if v is None else f"{v:.2f}" for v in (one.p50_s, one.p95_s))
        return f"p50 / p95 {values} s, {one.turns} turns" + (f", {one.failed} failed" if one.failed else "")

    def counted(one: Part | None) -> str:
        return "not told" if one is None or one.part is None else f"{one.count} of {one.of}, {100 * one.part:.1f} %"

    unheard = "not told" if found.kept_unheard is None else f"{100 * found.kept_unheard:+.0f} %"
    return [
        ("first words", delay(found.first_words)),
        ("final transcript", delay(found.finals)),
        ("word errors", counted(found.word_errors)),
        ("voice to voice", delay(found.voice_to_voice)),
        ("pauses of 1 s taken over", counted(found.pauses_taken_over)),
        ("barge-in, until it is told", delay(found.barge_in)),
        ("barge-ins not told", counted(found.not_noticed)),
        ("kept of a cut answer beyond what was heard", unheard),
    ]
