"""openai-python, unmodified, against a real server process and real recordings."""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

from antiphon.audio import Pcm
from tests.conftest import Process, Recording
from tests.server.clients import b64, connect, vllm

JFK = "ask not what your country can do for you"


def letters(text: str) -> str:
    return re.sub(r"[^a-z ]", "", text.lower())


def padded(pcm: Pcm, seconds: float = 1.5) -> Pcm:
    return np.concatenate((pcm, np.zeros(int(seconds * 16000), np.float32)))


@pytest.mark.parametrize("manual", [False, True], ids=["server_vad", "manual"])
def test_when_openai_python_transcribes_live_then_events_come_in_the_vendors_order(
    server: Process, recordings: dict[str, Recording], manual: bool
) -> None:
    async def main() -> tuple[list[str], str, str]:
        client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
        kinds, deltas, final = [], "", ""
        async with client.realtime.connect(
            model="gpt-4o-transcribe", extra_query={"intent": "transcription"}
        ) as connection:
            turn = None if manual else {"type": "server_vad", "silence_duration_ms": 700}
            await connection.session.update(
                session={
                    "type": "transcription",
                    "audio": {
                        "input": {
                            "transcription": {"model": "gpt-4o-transcribe", "language": "en"},
                            "turn_detection": turn,
                        }
                    },  # type: ignore[typeddict-item]
                }
            )
            for part in np.array_split(padded(recordings["lj-LJ001-0004"].pcm), 30):
                await connection.input_audio_buffer.append(audio=b64(part, 24000))
            if manual:
                await connection.input_audio_buffer.commit()
            async for event in connection:
                kinds.append(event.type)
                if event.type == "conversation.item.input_audio_transcription.delta":
                    deltas += event.delta or ""
                if event.type == "conversation.item.input_audio_transcription.completed":
                    final = event.transcript
                    break
                assert event.type != "error", event
        return kinds, deltas, final

    kinds, deltas, final = asyncio.run(asyncio.wait_for(main(), 60))
    assert "immediate predecessors of the" in letters(final)
    assert letters(deltas).split()[-3:] == letters(final).split()[-3:]
    order = [k for k in kinds if not k.endswith("delta")]
    head = ["session.created", "session.updated"]
    tail = ["input_audio_buffer.committed", "conversation.item.added", "conversation.item.done"]
    vad = [] if manual else ["input_audio_buffer.speech_started", "input_audio_buffer.speech_stopped"]
    assert order == [*head, *vad, *tail, "conversation.item.input_audio_transcription.completed"]


def test_when_the_dialect_is_vllm_then_openai_python_still_reads_the_first_frame(server: Process) -> None:
    async def main() -> str:
        client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")
        async with client.realtime.connect(model="default", extra_query={"dialect": "vllm"}) as connection:
            return (await connection.recv()).type

    assert asyncio.run(asyncio.wait_for(main(), 30)) == "session.created"


def test_when_a_vllm_client_streams_then_its_deltas_are_the_transcript_with_word_times(
    server: Process, recordings: dict[str, Recording]
) -> None:
    async def main() -> tuple[str, str, dict[str, object]]:
        async with connect(server.ws) as wire:
            await wire.say("session.update", model="default", word_timestamps=True)
            await wire.say("input_audio_buffer.commit")
            for part in np.array_split(recordings["lj-LJ001-0004"].pcm, 50):
                await wire.sound(part)
                await asyncio.sleep(0.05)
            await wire.say("input_audio_buffer.commit", final=True)
            done = await wire.until("transcription.done")
            return wire.joined(), done["text"], done

    joined, text, done = asyncio.run(main())
    assert joined == text
    assert "immediate predecessors" in text
    usage: Any = done["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    words = done["words"]
    assert isinstance(words, list)
    assert all(a["start"] <= a["end"] <= b["end"] for a, b in pairwise(words))
    assert 4.0 < words[-1]["end"] < 5.6


def test_when_speech_is_not_english_then_it_is_detected_or_taken_as_named(
    server: Process, recordings: dict[str, Recording]
) -> None:
    async def main() -> tuple[str, str]:
        async with connect(server.ws) as wire:
            german = await vllm(wire, recordings["fleurs-de-001"].pcm)
        async with connect(server.ws) as wire:
            spanish = await vllm(wire, recordings["fleurs-es-000"].pcm, language="es")
        return german, spanish

    for heard, recording in zip(
        asyncio.run(main()), (recordings["fleurs-de-001"], recordings["fleurs-es-000"]), strict=True
    ):
        expected = set(letters(recording.text).split())
        assert len(expected & set(letters(heard).split())) >= 0.6 * len(expected), heard


def test_when_a_connection_has_two_utterances_then_each_has_its_own_transcript(
    server: Process, recordings: dict[str, Recording]
) -> None:
    async def main() -> list[str]:
        async with connect(server.ws) as wire:
            return [await vllm(wire, recordings[i].pcm) for i in ("lj-LJ001-0008", "lj-LJ001-0002")]

    first, second = asyncio.run(main())
    assert "never been surpassed" in letters(first)
    assert "modern" in letters(second)
    assert "surpassed" not in second


@pytest.mark.parametrize("name", ["esc10-002-2-101676-A", "esc10-010-2-18766-A", "librosa-trumpet", "silence"])
def test_when_there_is_no_speech_then_the_transcript_is_empty(
    server: Process, recordings: dict[str, Recording], name: str
) -> None:
    pcm = np.zeros(5 * 16000, np.float32) if name == "silence" else recordings[name].pcm

    async def main() -> str:
        async with connect(server.ws) as wire:
            return await vllm(wire, padded(pcm))

    assert asyncio.run(main()) == ""


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(server: Process) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_when_openai_python_sends_a_file_then_it_gets_its_text_in_every_format(
    client: OpenAI, recordings: dict[str, Recording]
) -> None:
    path: Path = recordings["jfk"].path
    answer = client.audio.transcriptions.create(model="whisper-1", file=path)
    assert JFK in letters(answer.text)
    assert answer.usage is not None
    assert answer.usage.type == "duration"
    assert answer.usage.seconds == pytest.approx(11.0, abs=0.1)
    for form in ("text", "srt", "vtt"):
        text = client.audio.transcriptions.create(model="default", file=path, response_format=form)
        assert JFK in letters(str(text)).replace("\n", " ")
        assert ("-->" in str(text)) == (form != "text")
    assert str(text).startswith("WEBVTT\n\n00:00:00.")


def test_when_verbose_json_is_asked_for_then_it_has_segments_and_words(
    client: OpenAI, recordings: dict[str, Recording]
) -> None:
    answer = client.audio.transcriptions.create(
        model="default",
        file=recordings["jfk"].path,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert answer.language == "en"
    assert float(answer.duration) == pytest.approx(11.0, abs=0.1)
    assert answer.segments
    assert answer.words
    assert answer.words[-1].end <= 11.1
    assert JFK in letters(" ".join(w.word for w in answer.words))


def test_when_openai_python_streams_a_file_then_its_deltas_are_the_text(
    client: OpenAI, recordings: dict[str, Recording]
) -> None:
    text, done = "", None
    for event in client.audio.transcriptions.create(
        model="gpt-4o-transcribe", file=recordings["jfk"].path, stream=True
    ):
        if event.type == "transcript.text.delta":
            text += event.delta
        elif event.type == "transcript.text.done":
            done = event
    assert done is not None
    assert done.text == text
    assert JFK in letters(text)
    assert done.usage is not None
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens


def test_when_openai_python_translates_a_file_then_it_gets_english(
    client: OpenAI, recordings: dict[str, Recording]
) -> None:
    with pytest.deprecated_call():
        answer = client.audio.translations.create(model="whisper-1", file=recordings["fleurs-de-001"].path)
    text = letters(answer.text)
    assert len(set(text.split()) & {"the", "and", "of", "to", "in", "is", "a"}) >= 2, text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "xml"}, "response_format"),
        ({"language": "tlh"}, "language"),
        ({"temperature": "7"}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ({"response_format": "verbose_json", "timestamp_granularities[]": "letter"}, "timestamp_granularities"),
        ({"model": ""}, "model"),
    ],
)
def test_when_a_form_field_is_wrong_then_the_400_names_it(
    server: Process, recordings: dict[str, Recording], fields: dict[str, str], param: str
) -> None:
    files = {"file": recordings["lj-LJ001-0008"].path.read_bytes()}
    answer = httpx.post(f"{server.url}/v1/audio/transcriptions", data={"model": "default", **fields}, files=files)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("data", [b"", b"this is text", bytes(5000)], ids=["empty", "text", "zeros"])
def test_when_a_file_has_no_audio_then_the_400_names_the_file(client: OpenAI, data: bytes) -> None:
    with pytest.raises(BadRequestError) as error:
        client.audio.transcriptions.create(model="default", file=("a.wav", data))
    assert error.value.param == "file"


def test_when_a_model_is_unknown_then_it_is_a_404(client: OpenAI, recordings: dict[str, Recording]) -> None:
    with pytest.raises(NotFoundError):
        client.audio.transcriptions.create(model="nonsense", file=recordings["jfk"].path)
    with pytest.raises(NotFoundError):
        client.models.retrieve("nonsense")


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [("/v1/nothing", "GET", 404), ("/v1/audio/transcriptions", "GET", 405), ("/v1/audio/transcriptions", "POST", 400)],
)
def test_when_a_path_or_method_is_wrong_then_the_error_has_openais_shape(
    server: Process, path: str, method: str, status: int
) -> None:
    answer = httpx.request(method, server.url + path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_when_the_server_is_ready_then_models_probes_and_metrics_answer(client: OpenAI, server: Process) -> None:
    assert [m.id for m in client.models.list()] == ["whisper-base", "default"]
    assert client.models.retrieve("default").id == "default"
    assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
    ready = httpx.get(f"{server.url}/ready").json()
    assert ready["status"] == "ready"
    assert ready["serves"] == ["captions"]
    metrics = httpx.get(f"{server.url}/metrics").text
    for name in (
        "sessions{",
        "audio_seconds_total{",
        "queue_age_seconds{",
        "step_seconds_bucket{",
        "latency_seconds_bucket{",
    ):
        assert f"antiphon_{name}" in metrics
