"""Files over REST: what is asked for, which answers are understood, and what a server that refuses some of it gets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from antiphon.contracts import FileOptions, Hypothesis, Window, one_slab
from antiphon.errors import Refused
from antiphon.remote.transcriber.transcriber import RemoteTranscriber
from tests.contracts.transcribers import remote
from tests.remote.transcriber.faults import on_a_port

SOUND = np.full(16000, 0.1, np.float32)


class Files:
    """A server of files. It answers `verbose_json` with `verbose`, or 400 if that is None, and `json` with a text."""

    def __init__(self, verbose: dict[str, Any] | None) -> None:
        self.verbose = verbose
        self.forms: list[dict[str, list[str]]] = []
        self.paths: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            size = next((int(h.split(":")[1]) for h in head.splitlines() if h.lower().startswith("content-length")), 0)
            body = await reader.readexactly(size)
            status, answer = self.answer(head.split(" ")[1], body)
            data = json.dumps(answer).encode()
            writer.write(
                f"HTTP/1.1 {status} x\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data
            )
            await writer.drain()
        finally:
            writer.close()

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if b'name="file"' not in body:
            return (400, {}) if "audio" in path else (404, {})
        fields: dict[str, list[str]] = {}
        for part in body.split(b"\r\n--"):
            name, _, value = part.partition(b"\r\n\r\n")
            if b"filename" not in name and b'name="' in name:
                fields.setdefault(name.decode().split('name="')[1].split('"')[0], []).append(value.decode().strip())
        self.forms.append(fields)
        self.paths.append(path)
        if fields["response_format"] == ["json"]:
            return 200, {"text": "plain words"}
        return (200, self.verbose) if self.verbose else (400, {"error": {"message": "no verbose_json"}})


def asked(server: Files, *windows: Window) -> list[Hypothesis]:
    async def main(transcriber: RemoteTranscriber) -> list[Hypothesis]:
        stream = transcriber.open()
        try:
            return [await stream.decode(window) for window in windows]
        finally:
            await transcriber.pool.close()

    with on_a_port(server.serve) as port:
        return asyncio.run(main(remote(f"http://127.0.0.1:{port}/v1/audio/transcriptions", model="m")))


def test_a_final_has_the_servers_times_probabilities_and_language() -> None:
    words = [
        {"word": "Guten", "start": 0.1, "end": 0.3, "probability": 0.9},
        {"word": "Tag", "start": 0.4, "end": 0.6, "confidence": 0.7},
    ]
    server = Files({"text": " Guten Tag", "language": "german", "words": words, "segments": [{"no_speech_prob": 0.1}]})
    (found,) = asked(server, Window(SOUND, final=True, word_times=True, prompt="Namen", language="de"))
    assert [(w.text, w.start_s, w.end_s, w.probability) for w in found.words] == [
        ("Guten", 0.1, 0.3, 0.9),
        ("Tag", 0.4, 0.6, 0.7),
    ]
    assert (found.language, found.is_speech) == ("de", True)
    form = server.forms[0]
    assert (form["model"], form["language"], form["prompt"]) == (["m"], ["de"], ["Namen"])
    assert form["timestamp_granularities[]"] == ["word", "segment"]


def test_words_within_segments_are_understood_and_segments_of_noise_are_no_speech() -> None:
    inside = [{"word": " Hi", "start": 0.0, "end": 0.2}]
    (found,) = asked(Files({"text": "Hi", "segments": [{"words": inside}]}), Window(SOUND, final=True, word_times=True))
    assert found.words[0].end_s == 0.2
    noise = {"text": "you", "segments": [{"no_speech_prob": 0.9, "avg_logprob": -1.4}]}
    (found,) = asked(Files(noise), Window(SOUND, final=True))
    assert not found.is_speech


def test_a_server_that_refuses_verbose_json_is_asked_for_plain_text_from_then_on() -> None:
    server = Files(None)
    found = asked(server, *[Window(SOUND, final=True, word_times=True)] * 2)
    assert ["".join(p.text for p in one.pieces) for one in found] == [" plain words"] * 2
    assert [form["response_format"][0] for form in server.forms] == ["verbose_json", "json", "json"]
    assert len(found[1].words) == 2


def test_a_partial_asks_for_plain_text() -> None:
    server = Files({"text": "x"})
    asked(server, Window(SOUND))
    assert server.forms[0]["response_format"] == ["json"]


@pytest.mark.parametrize("answer", [{}, {"text": 3}, {"words": "x"}])
def test_an_answer_without_a_text_is_a_failure_of_the_server(answer: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="no valid transcript"):
        asked(Files(answer or {"no": "text"}), Window(SOUND, final=True))


def test_a_translation_goes_to_its_own_path() -> None:
    server = Files({"text": "Good day", "language": "german"})

    async def main(transcriber: RemoteTranscriber) -> list[Any]:
        options = FileOptions(task="translate", language="de", temperature=0.4)
        found = [part async for part in transcriber.transcribe(one_slab(SOUND), options)]
        await transcriber.pool.close()
        return found

    with on_a_port(server.serve) as port:
        segment, info = asyncio.run(main(remote(f"http://127.0.0.1:{port}/v1/audio/transcriptions", model="m")))
    assert (segment.text, segment.temperature, info.language) == (" Good day", 0.4, "de")
    assert server.paths == ["/v1/audio/translations"]
    assert server.forms[0]["temperature"] == ["0.4"]
    assert "language" not in server.forms[0]
