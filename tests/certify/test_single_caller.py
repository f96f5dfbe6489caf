"""The figures of a single caller: counts of words, pauses and interruptions, and a run with a real server."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import websockets

from antiphon.admission.certificate import Part, SingleCallerFigures, Spread
from antiphon.certify.clients import captions_sessions
from antiphon.certify.recordings import Recording, read_recordings, speech_begin_s
from antiphon.certify.single_caller import (
    HESITATION_S,
    SingleCaller,
    hesitating,
    lines_of,
    num_word_errors,
    part,
    spread,
    words_of,
)
from antiphon.certify.wire import Event, Failed, Loudspeaker, begin, connected
from tests.conftest import DATA, SMALL, VOICE, Serve


@pytest.mark.parametrize(
    ("said", "heard", "errors"),
    [
        ("Yes, it is.", "yes it is", 0),
        ("one two three", "one three", 1),
        ("one two three", "one two too three", 1),
        ("one two three", "won two three four", 2),
        ("it’s fine", "it's fine", 0),
        ("one two", "", 2),
        ("", "one two", 2),
    ],
)
def test_word_errors_are_words_to_substitute_remove_and_add(said: str, heard: str, errors: int) -> None:
    assert num_word_errors(words_of(said), words_of(heard)) == errors


def test_a_hesitation_is_put_where_the_middle_is_quietest_and_moves_the_end() -> None:
    tone = np.sin(np.arange(32_000) / 5).astype(np.float32)
    tone[16_000:17_280] = 0.0
    found = hesitating(Recording("r", "a text", tone, 2.0))
    pause = slice(int(1.04 * 16_000), int((1.04 + HESITATION_S - 0.04) * 16_000))
    assert not found.pcm[pause].any()
    assert found.speech_end_s == pytest.approx(2.0 + HESITATION_S)
    assert len(found.pcm) == len(tone) + int(HESITATION_S * 16_000)
    np.testing.assert_array_equal(found.pcm[found.pcm != 0], tone[tone != 0])


def test_speech_begins_with_the_first_that_is_loud() -> None:
    tone = np.sin(np.arange(16_000) / 5).astype(np.float32)
    assert speech_begin_s(np.concatenate([np.zeros(8_000, np.float32), tone])) == pytest.approx(0.5, abs=0.02)
    assert speech_begin_s(np.zeros(0, np.float32)) == 0.0


def test_turns_are_summed_up_without_those_that_failed_and_nothing_is_made_of_none() -> None:
    assert spread([1.0, None, 3.0]) == Spread(3, 1, 1.0, 3.0)
    assert spread([None]) == Spread(1, 1, None, None)
    assert spread([]) is None
    assert part([True, False, False]) == Part(1, 3, 0.333)
    assert part([]) is None
    assert dict(lines_of(SingleCallerFigures()))["voice to voice"] == "not reported"


def test_silence_at_the_head_of_an_answer_is_not_heard_as_sound() -> None:
    speaker = Loudspeaker()
    for at_s, samples in ((10.0, np.zeros(12_000)), (10.1, np.concatenate([np.zeros(2_400), np.full(100, 3_000)]))):
        delta = base64.b64encode(samples.astype("<i2").tobytes()).decode()
        speaker.take(Event(delta=delta, item_id="i"), at_s)
    assert speaker.begun_s == 10.0
    # Silence comes before the sound: half a second in the first delta, and a tenth of a second in the second one.
    assert speaker.audible_s == pytest.approx(10.6)


@asynccontextmanager
async def answering(answer: Callable[[Any], Awaitable[None]]) -> AsyncIterator[str]:
    async with websockets.serve(answer, "127.0.0.1", 0) as server:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def test_a_server_that_knows_no_transcription_sessions_is_asked_for_one_that_does_not_answer() -> None:
    asked = list[dict[str, Any]]()

    async def answer(socket: Any) -> None:
        await socket.send(json.dumps({"type": "session.created"}))
        async for message in socket:
            asked.append(json.loads(message)["session"])
            refused = asked[-1]["type"] == "transcription"
            error = {"type": "error", "error": {"message": "there are none of these"}}
            await socket.send(json.dumps(error if refused else {"type": "session.updated"}))

    async def act() -> None:
        async with answering(answer) as url:
            async with connected(url, "") as socket:
                await begin(socket, *captions_sessions())
            async with connected(url, "") as socket:
                with pytest.raises(Failed, match="there are none of these"):
                    await begin(socket, captions_sessions()[0])

    asyncio.run(act())
    assert [session["type"] for session in asked] == ["transcription", "realtime", "transcription"]
    assert asked[1]["audio"]["input"]["turn_detection"]["create_response"] is False


def test_the_one_caller_asks_for_the_turn_detection_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.certify.single_caller.AFTER_FAILURE_S", 0.0)
    asked = list[dict[str, Any]]()

    async def answer(socket: Any) -> None:
        async for message in socket:
            asked.append(json.loads(message)["session"])
            await socket.send(json.dumps({"type": "error", "error": {"message": "no"}}))

    async def act() -> None:
        async with answering(answer) as url:
            caller = SingleCaller(url, "", read_recordings(DATA), 1, lambda _: None, "semantic_vad")
            await caller.measure(["conversation"])

    asyncio.run(act())
    assert {session["audio"]["input"]["turn_detection"]["type"] for session in asked} == {"semantic_vad"}


def test_a_server_that_speaks_another_language_is_told_of_and_measured_as_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("antiphon.certify.single_caller.AFTER_FAILURE_S", 0.0)

    async def answer(socket: Any) -> None:
        await socket.send("no JSON")

    async def act() -> SingleCallerFigures:
        async with answering(answer) as url:
            return await SingleCaller(url, "", read_recordings(DATA), 2, lambda _: None).measure()

    found = asyncio.run(act())
    assert (found.first_words, found.voice_to_voice, found.barge_in, found.word_errors) == (None, None, None, None)
    assert found.errors


@pytest.mark.heavy
@pytest.mark.server
def test_one_caller_of_a_real_server_is_measured_at_everything(serve: Serve) -> None:
    server = serve("--language-model", SMALL, "--synthesizer", VOICE)
    recordings = [r for r in read_recordings(DATA) if 1.5 < r.speech_end_s < 3.0]
    found = asyncio.run(SingleCaller(server.url, "", recordings, 2, lambda _: None).measure())
    # On a busy machine audio may be late, and an answer may arrive after PATIENCE_S.
    assert all(re.search(r"ms late|no answer arrived in time", error) for error in found.errors), found.errors
    for one in (found.first_words, found.finals, found.voice_to_voice):
        assert one
        assert one.turns == 2
        assert one.p95_s or one.failed
    assert found.word_errors
    assert found.word_errors.of > 2
    assert found.pauses_taken_over or found.errors
    if found.barge_in:
        # An answer may be too short to be interrupted.
        assert found.kept_unheard is not None
        assert -1 <= found.kept_unheard <= 1
