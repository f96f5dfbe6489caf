"""Qwen3-ASR with tiny random weights on a real server, on the wire and for files.

Its transcripts are random. The tests check that they arrive once, complete, and without the model's tags.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from openai import BadRequestError, OpenAI

from tests.adapters import tiny_qwen3_asr
from tests.conftest import Process, Recording, Serve
from tests.server.clients import connect


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Process:
    folder = tiny_qwen3_asr.write(tmp_path_factory.mktemp("tiny-asr"))
    return serve("--transcriber", str(folder), "--weights", "fp32")


def test_a_vllm_stream_gives_its_transcript_once_and_without_tags(
    server: Process, recordings: dict[str, Recording]
) -> None:
    async def main() -> tuple[str, str, dict[str, int]]:
        async with connect(server.ws) as wire:
            await wire.say("session.update", model="default", language="en")
            await wire.say("input_audio_buffer.commit")
            for part in np.array_split(recordings["lj-LJ001-0004"].pcm, 40):
                await wire.sound(part)
                await asyncio.sleep(0.05)
            await wire.say("input_audio_buffer.commit", final=True)
            done = await wire.until("transcription.done")
            return wire.joined(), done["text"], done["usage"]

    joined, text, usage = asyncio.run(main())
    assert joined == text
    assert text
    assert "language English" not in text
    assert not [t for t in tiny_qwen3_asr.SPECIAL if t in text]
    assert usage["completion_tokens"] > 0


def test_files_are_transcribed_with_times_and_not_translated(server: Process, recordings: dict[str, Recording]) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    path = recordings["jfk"].path
    answers = [client.audio.transcriptions.create(model="default", file=path, language="en").text for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0]
    timed = client.audio.transcriptions.create(
        model="default",
        file=path,
        language="en",
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert timed.language
    assert timed.words
    assert timed.segments
    assert timed.segments[-1].end == pytest.approx(11.0, abs=0.1)
    with pytest.deprecated_call(), pytest.raises(BadRequestError, match="does not translate"):
        client.audio.translations.create(model="default", file=path)
