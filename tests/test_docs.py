"""Docs say what there is: every wire event, tuning field and command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from antiphon.cli.main import _parser
from antiphon.protocols import DIALECTS
from antiphon.protocols.openai import transcription as openai_transcription
from antiphon.protocols.vllm import dialect as vllm_realtime

ROOT = Path(__file__).parents[1]
VLLM = (ROOT / "docs/wire/vllm-realtime.md").read_text()
OPENAI = (ROOT / "docs/wire/openai-transcription.md").read_text()


@pytest.mark.parametrize("name", [*vllm_realtime.EVENTS, *(f for f, *_ in vllm_realtime.TUNING)])
def test_the_vllm_dialect_is_documented(name: str) -> None:
    assert f"`{name}`" in VLLM


@pytest.mark.parametrize("name", openai_transcription.EVENTS)
def test_the_openai_dialect_is_documented(name: str) -> None:
    assert f"`{name}`" in OPENAI


@pytest.mark.parametrize(("trace", "document"), [("vllm", VLLM), ("openai", OPENAI), ("openai-beta", OPENAI)])
def test_every_frame_of_the_traces_is_documented(trace: str, document: str) -> None:
    for line in (ROOT / f"tests/traces/{trace}.jsonl").read_text().splitlines():
        kind = json.loads(line)["type"]
        short = kind.replace("conversation.item.input_audio_transcription", "…transcription")
        if kind.startswith(("session.", "transcription_session.", "error")):
            continue
        assert kind in document or short in document, kind


def test_the_speech_stream_is_documented() -> None:
    document = (ROOT / "docs/wire/speech-stream.md").read_text()
    source = (ROOT / "src/antiphon/protocols/speech/stream.py").read_text()
    kinds = set(re.findall(r'"((?:session|input|audio)\.[a-z]+)"', source))
    assert len(kinds) >= 9
    for kind in kinds:
        assert f"`{kind}" in document or f"`{kind} " in document, kind
    fields = (ROOT / "src/antiphon/protocols/speech/fields.py").read_text()
    for name in set(re.findall(r'fields(?:\.get\(|\[)"([a-z_]+)"', fields)):
        assert f"`{name}`" in document, name


def test_every_command_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    commands = next(a for a in _parser()._actions if a.dest == "command").choices
    assert commands
    for name in commands:
        assert f"antiphon {name}" in readme


def test_every_dialect_of_the_table_exists() -> None:
    for target in DIALECTS.values():
        module, name = target.split(":")
        assert hasattr(__import__(module, fromlist=[name]), name)
