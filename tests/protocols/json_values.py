"""JSON values that resemble a client's messages: any known fields, with any values."""

from __future__ import annotations

from hypothesis import strategies as st

KEYS = st.sampled_from(
    (
        "type",
        "session",
        "audio",
        "input",
        "output",
        "format",
        "turn_detection",
        "transcription",
        "tools",
        "tool_choice",
        "voice",
        "speed",
        "rate",
        "item",
        "content",
        "role",
        "text",
        "response",
        "item_id",
        "content_index",
        "audio_end_ms",
        "previous_item_id",
        "max_output_tokens",
        "metadata",
        "output_modalities",
        "modalities",
        "instructions",
        "eagerness",
        "name",
        "parameters",
        "call_id",
        "arguments",
        "event_id",
        "conversation",
    )
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9999)
    | st.text(max_size=6)
    | st.sampled_from(["realtime", "function", "server_vad", "message", "user", "root"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
