"""Wire dialects, sans-IO: `receive(frame)` queues inputs and answers, `send(output)` queues frames.

`DIALECTS` is the table of those a WebSocket can speak; a new one is one file and one line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

DIALECTS: Mapping[str, str] = MappingProxyType(
    {
        "vllm": "antiphon.protocols.vllm.dialect:VllmDialect",
        "openai": "antiphon.protocols.openai.transcription:OpenAITranscription",
    }
)
