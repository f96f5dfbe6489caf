"""The kinds of sessions, and what happens to each when its host is lost: the table of docs/design/hosts.md.

python -m tests.cluster.kinds        prints the table
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "hosts.json"
# A session that no host continues.
LOST = "the session"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of session.

    `dialects` are the names of its rows in the table of dialects. `lost` is what its client loses with the host, and
    `waits` what it waits for. `tests` are the files of this folder, without `.py`, that lose its host. `measured` is
    the path of its pauses in the results of `antiphon bench hosts`.
    """

    name: str
    dialects: tuple[str, ...] = ()
    lost: str = LOST
    waits: str = ""
    tests: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()

    @property
    def pause(self) -> str:
        """The measured pause, in seconds: median and 95th percentile; "" if it was not measured."""
        found: Any = json.loads(RESULTS.read_text())
        for name in self.measured:
            found = found.get(name, {})
        figures = [found[key] for key in sorted(found) if key.endswith(("p50_s", "p95_s"))] if self.measured else []
        return " / ".join(f"{value:.1f}" for value in figures)


KINDS = (
    Kind(
        "conversation, full duplex",
        ("realtime", "duplex"),
        "nothing; a response begins again",
        "the TTL, or a report",
        ("test_chaos",),
        ("killed and reported, behind a door",),
    ),
    Kind(
        "WebRTC call, behind a door",
        ("realtime",),
        "nothing; a response begins again",
        "the same",
        ("door/test_calls",),
    ),
    Kind(
        "telephone call, at a door",
        ("realtime",),
        "nothing; a response begins again",
        "the same",
        ("door/test_telephone",),
        ("telephone, killed and reported, at a door", "gap"),
    ),
    Kind(
        "transcription, OpenAI's dialect",
        ("realtime",),
        "nothing",
        "the same, and one decode",
        ("test_captions", "test_chaos"),
        ("captions, killed and reported, behind a door",),
    ),
    Kind(
        "transcription, vLLM's dialect",
        ("realtime",),
        "nothing",
        "the same, and one decode",
        ("test_captions", "test_chaos"),
    ),
    Kind(
        "speech stream",
        lost="nothing",
        waits="another host, and a part of a sentence",
        tests=("test_speech",),
        measured=("speech, killed and reported, behind a door", "stream"),
    ),
    Kind(
        "speech over REST, behind a door",
        lost="nothing",
        waits="another host, and the audio so far",
        tests=("test_speech",),
        measured=("speech, killed and reported, behind a door", "request"),
    ),
    Kind("Gemini Live", ("gemini",), "the response under way", "its client, which sends the handle"),
    Kind("bridges to other servers' clients", ("minicpmo", "omni", "openbmb")),
    Kind(
        "clients of other hosted services",
        (
            *("assemblyai", "cartesia", "deepgram", "deepgram_agent", "elevenlabs_agent", "flux", "openai_live"),
            "scribe",
        ),
    ),
    Kind(
        "native model",
        lost="how things sounded; a response begins again",
        waits="the same, and its units",
        tests=("test_kinds",),
        measured=("native model, killed in each turn, behind a door", "gap"),
    ),
    Kind(
        "response out of band",
        lost="nothing; it begins again; with images or audio, the response",
        waits="the same",
        tests=("test_kinds",),
    ),
    Kind(
        "video stream",
        lost="older frames and audio; an answer under way begins again",
        waits="the same",
        tests=("test_kinds",),
    ),
    Kind("other requests over REST", lost="the request"),
)


def table() -> str:
    """Return the table in Markdown."""
    lines = [
        "| kind | what is lost when its host dies | the client waits for | pause p50 / p95, s | test |",
        "|---|---|---|---|---|",
    ]
    for kind in KINDS:
        tests = ", ".join(f"`{name}`" for name in kind.tests)
        lines.append(f"| {kind.name} | {kind.lost} | {kind.waits} | {kind.pause} | {tests} |".replace("|  |", "| |"))
    return "\n".join(lines).replace("|  |", "| |") + "\n"


if __name__ == "__main__":
    print(table())
