"""Who says what in a file, through OpenAI's own client, with scripted models: words above 200 are another voice's."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI
from openai.types.audio import TranscriptionDiarized

from antiphon.audio import Pcm
from tests.audio.sound_files import pcm16, wav
from tests.scripted import ScriptedVoices, speech
from tests.server.scripted import serving

# 6.4 s of each voice, then 0.64 s of silence.
ONE, OTHER = speech(1, 20, 20), speech(201, 20, 20)
DIALOGUE = np.concatenate((ONE, OTHER, speech(21, 4, 50)))
TEXTS = [" ".join(f"w{n}" for n in range(*span)) for span in ((1, 21), (201, 221), (21, 25))]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(speaker_model=ScriptedVoices()) as (ws, _, _):
        yield ws.replace("ws", "http", 1)


@pytest.fixture(scope="module")
def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def data_url(pcm: Pcm) -> str:
    return "data:audio/wav;base64," + base64.b64encode(wav(pcm16(pcm))).decode()


ASKED: dict[str, Any] = {
    "model": "gpt-4o-transcribe-diarize",
    "file": ("a.wav", wav(pcm16(DIALOGUE))),
    "response_format": "diarized_json",
    "chunking_strategy": "auto",
}


def test_openai_python_gets_segments_with_speakers(client: OpenAI) -> None:
    answer = client.audio.transcriptions.create(**ASKED)
    assert isinstance(answer, TranscriptionDiarized)
    assert [(s.id, s.speaker, s.text) for s in answer.segments] == [
        ("seg_001", "A", TEXTS[0]),
        ("seg_002", "B", TEXTS[1]),
        ("seg_003", "A", TEXTS[2]),
    ]
    assert answer.text == " ".join(TEXTS)
    assert answer.segments[1].start == pytest.approx(7.04, abs=0.01)
    assert answer.segments[1].end == pytest.approx(13.44, abs=0.01)
    assert answer.duration == pytest.approx(len(DIALOGUE) / 16_000, abs=0.01)
    assert answer.task == "transcribe"


def test_known_speakers_have_their_names(client: OpenAI) -> None:
    answer = client.audio.transcriptions.create(
        **ASKED,
        known_speaker_names=["agent", "B"],
        known_speaker_references=[data_url(speech(205, 8)), data_url(speech(230, 8))],
    )
    # Both references are one voice; the more similar one, or the first, has its name. "B" is no label then.
    assert [s.speaker for s in answer.segments] == ["A", "agent", "A"]


def test_openai_python_streams_text_then_segments(client: OpenAI) -> None:
    events = list(client.audio.transcriptions.create(**ASKED, stream=True))
    kinds = [event.type for event in events]
    assert kinds == ["transcript.text.delta"] + 3 * ["transcript.text.segment"] + ["transcript.text.done"]
    assert events[0].delta == events[-1].text == " ".join(TEXTS)
    assert [(e.id, e.speaker, e.text) for e in events if e.type == "transcript.text.segment"] == [
        ("seg_001", "A", TEXTS[0]),
        ("seg_002", "B", TEXTS[1]),
        ("seg_003", "A", TEXTS[2]),
    ]


def post(url: str, pcm: Pcm = DIALOGUE, /, **fields: Any) -> httpx.Response:
    form = {"model": "default", **fields}
    file = {"file": ("a.wav", wav(pcm16(pcm)))}
    return httpx.post(f"{url}/v1/audio/transcriptions", data=form, files=file, timeout=30)


def test_other_formats_tell_speakers_if_asked(url: str) -> None:
    assert f"<v B>{TEXTS[1]}" in post(url, response_format="vtt", speaker_labels="true").text
    assert f"B: {TEXTS[1]}" in post(url, response_format="srt", speaker_labels="true").text
    answer = post(url, response_format="verbose_json", speaker_labels="true", chunking_strategy="null").json()
    assert [s["speaker"] for s in answer["segments"]] == ["A", "B", "A"]
    assert "<v" not in post(url, response_format="vtt").text
    assert all("speaker" not in s for s in post(url, response_format="verbose_json").json()["segments"])


def test_hints_are_followed(url: str) -> None:
    for hint in ({"speakers": "1"}, {"max_speakers": "1"}):
        answer = post(url, response_format="diarized_json", **hint).json()
        assert {s["speaker"] for s in answer["segments"]} == {"A"}


def test_channels_that_are_no_call_are_distinguished_by_voice(url: str) -> None:
    answer = post(url, response_format="diarized_json", channels="auto").json()
    assert [s["speaker"] for s in answer["segments"]] == ["A", "B", "A"]


@pytest.mark.parametrize("pcm", [speech(1, 1), np.zeros(16_000, np.float32)], ids=["0.3 s of speech", "silence"])
def test_little_or_no_speech_is_no_error(url: str, pcm: Pcm) -> None:
    answer = post(url, pcm, response_format="diarized_json")
    assert answer.status_code == 200
    assert [s["speaker"] for s in answer.json()["segments"]] == ["A"] * bool(pcm.any())


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"known_speaker_references[]": data_url(ONE)}, "known_speaker_references", "0 known_speaker_names and 1"),
        (
            {"known_speaker_names[]": list("abcde"), "known_speaker_references[]": [data_url(ONE)] * 5},
            "known_speaker_names",
            "4 of them by references",
        ),
        ({"known_speaker_names[]": "a\u0007", "known_speaker_references[]": data_url(ONE)}, "known_speaker_names", ""),
        ({"known_speaker_names[]": "a", "known_speaker_references[]": "a.wav"}, "known_speaker_references", "data URL"),
        (
            {"known_speaker_names[]": "a", "known_speaker_references[]": "data:audio/wav;base64,AAAA"},
            "known_speaker_references",
            "cannot be used",
        ),
        (
            {"known_speaker_names[]": "a", "known_speaker_references[]": data_url(speech(1, 2, 20))},
            "known_speaker_references",
            "1 s are needed",
        ),
        (
            {
                "known_speaker_names[]": "a",
                "known_speaker_references[]": data_url(np.concatenate((ONE[:64_000], OTHER))),
            },
            "known_speaker_references",
            "two voices",
        ),
        ({"speakers": "0"}, "speakers", "1 to 99"),
        ({"max_speakers": "many"}, "max_speakers", "1 to 99"),
        ({"speaker_labels": "true", "response_format": "json"}, "speaker_labels", "needs response_format"),
        ({"speaker_labels": "1", "response_format": "srt", "stream": "1"}, "speaker_labels", "A stream"),
    ],
)
def test_what_cannot_be_done_is_refused(url: str, fields: dict[str, Any], param: str, said: str) -> None:
    answer = post(url, **{"response_format": "diarized_json", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert said in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "invalid_value"


def test_a_model_that_fails_ends_the_request(url: str) -> None:
    voices = ScriptedVoices()
    voices.fails = True
    with serving(speaker_model=voices) as (ws, _, _):
        broken = ws.replace("ws", "http", 1)
        assert post(broken, response_format="diarized_json").status_code == 500
        assert '"type":"server_error"' in post(broken, response_format="diarized_json", stream="1").text
        # Nobody else needs the model.
        assert post(broken).status_code == 200
