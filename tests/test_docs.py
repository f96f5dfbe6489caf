"""The docs cover every message, field, value and error code on the wire, and every command."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args
from urllib.parse import parse_qs, urlsplit

import pytest

from antiphon.cli.arguments import BENCHMARKS, COMMANDS
from antiphon.protocols.duplex.messages import SIGNALLED, DuplexMessage
from antiphon.protocols.openai.conversation import ConversationInput
from antiphon.protocols.openai.transcription import TranscriptionMessage
from antiphon.protocols.vllm.messages import FIELDS, VllmMessage
from tests.wire_examples.reading import FENCE, PAGES

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "antiphon"
RECORDED = ROOT / "tests" / "traces" / "recorded"

# Each folder or module below src/antiphon, with the pages that together describe it.
SOURCES: dict[str, tuple[str, ...]] = {
    "protocols/negotiation.py": ("index", "vllm-realtime"),
    "protocols/resume.py": ("index",),
    "protocols/openai/conversation.py": ("openai-realtime", "webrtc"),
    "protocols/realtime": ("openai-realtime", "openai-transcription", "duplex", "index"),
    "protocols/openai/transcription.py": ("openai-transcription",),
    "protocols/vllm": ("vllm-realtime",),
    "protocols/duplex": ("duplex",),
    "sessions/duplex": ("duplex", "openai-realtime"),
    "protocols/bridges": ("bridges",),
    "protocols/gemini": ("gemini-live",),
    "protocols/openai_live": ("openai-live",),
    "protocols/speech": ("speech-stream", "speech"),
    "protocols/video": ("video-stream",),
    "protocols/rest/chat.py": ("chat-completions",),
    "protocols/rest/transcriptions.py": ("transcriptions",),
    "protocols/deepgram": ("deepgram", "deepgram-agent"),
    "protocols/wyoming": ("wyoming",),
    "protocols/assemblyai": ("assemblyai",),
    "protocols/cartesia": ("cartesia",),
    "protocols/elevenlabs": ("elevenlabs", "elevenlabs-agents"),
    "protocols/telephony": ("telephone",),
    "server/wyoming": ("wyoming",),
    "server/telephone/offers.py": ("telephone",),
    "server/routes/calls.py": ("webrtc", "telephone"),
    "server/routes/chat.py": ("chat-completions",),
    "server/routes/client_secrets.py": ("client-secrets",),
    "server/routes/health.py": ("bridges", "index"),
    "server/routes/speech.py": ("speech",),
    "server/routes/telephone.py": ("telephone",),
    "server/routes/speakers.py": ("speakers",),
    "server/routes/voices.py": ("speech",),
    "server/routes/vendors/cartesia.py": ("cartesia",),
    "server/routes/vendors/elevenlabs.py": ("elevenlabs", "elevenlabs-agents"),
    "server/routes/vendors/elevenlabs_voices.py": ("elevenlabs",),
    "server/routes/transcriptions.py": ("transcriptions",),
}
# Names in the source that never appear on the wire.
INTERNAL = {
    # Names of dialects and refusals in metrics.
    *("bridge", "minicpmo", "undecided", "unauthorized", "no_room", "first_sound", "first_token", "live"),
    # A kind of session, and a kind of item.
    *("captions", "tool_list"),
    # Codes of errors of dialects that send only the message.
    *("too_large", "unexpected", "invalid_request"),
    # Internal words: a setting of vLLM's tuning, a default eagerness, a prefix, an error handler for decoding text.
    *("max_tokens", "medium", "g711", "replace"),
    # The reason why a bridge interrupts, which is not sent.
    "client_force_listen",
    # Names of other vendors' dialects in metrics, and encodings that their clients call by other names.
    *("assemblyai", "cartesia", "cartesia_turns", "cartesia_speech", "elevenlabs", "elevenlabs_multi", "scribe"),
    "elevenlabs_agent",
    # A field of our own uploads of voices.
    "speaker_description",
    *("s16", "f32", "container", "clause", "base64", "verbose_json"),
    # Values that clients write for a missing or false one.
    *("undefined", "false", "none", "multi"),
    # Encodings of a telephone's audio, a field of the ASGI scope, and words of schemas of functions.
    *("ulaw", "alaw", "pcm16", "pcmu", "pcma", "subprotocols", "stereo"),
    *("properties", "required", "enum", "object", "string", "is_outgoing"),
    # Fields of stored sessions, which are not sent.
    *("waiting", "items"),
    # Of Deepgram's dialects: names in metrics, encodings of samples, kinds of items and parts, arguments of methods.
    *("deepgram_agent", "deepgram_speak", "s16", "f32", "pcm", "function_call_output", "output_text", "input_text"),
    *("milliseconds", "ascii"),
    # A code that is not sent, because Deepgram's errors over HTTP have none.
    "model_not_found",
    # Internal choices for a request during a response, which are not sent.
    *("wait", "cut"),
    # Why a response is interrupted by a client of Gemini Live, and fields of its stored sessions.
    *("activity_start", "client_content", "epoch", "calls", "setup"),
    # Names of dialects in metrics, and a role that clients do not name.
    *("openai_live", "system"),
    # An error handler for decoding text, and a default of `tool_choice`.
    *("ignore", "auto"),
}
# Prefixes of an error's `param`, which are not fields by themselves, as in `session.audio.input`.
OLDER_PARAMS = "session.input_audio_", "session.turn_detection", "session.type", "session.include"
NAME = re.compile(r"[a-z][a-z0-9]*(?:[._][a-z0-9]+)*")

SHAPE = (
    ("Connecting",),
    ("Messages in", "Requests"),
    ("Messages out", "Answers"),
    ("Errors",),
    ("Limits",),
    ("Differences",),
    ("Example",),
)
WIDTH = 120


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


def says(text: str, name: str) -> bool:
    """Return whether the page contains this name as a whole word."""
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


# --- names in the source


def names(tree: ast.Module) -> dict[str, int]:
    """Return the names (lower-case words joined by `_` or `.`) in strings and messages, each with its line."""
    found: dict[str, int] = {}
    ignored = {id(node) for node in _not_names(tree)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in ignored and NAME.fullmatch(text):
                found.setdefault(text, node.lineno)
            case ast.Call(keywords=keywords) if _makes_message(node):
                found |= {k.arg: node.lineno for k in keywords if k.arg and k.arg not in found}
            case ast.ClassDef(bases=bases, body=body) if any(ast.unparse(b).endswith("Struct") for b in bases):
                fields = [s.target.id for s in body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
                found |= {f: node.lineno for f in fields if f not in found}
    return found


def _not_names(tree: ast.Module) -> Iterator[ast.AST]:
    """Return the strings that are not names: docstrings, parts of longer strings, and an error's `param`."""
    for node in ast.walk(tree):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if node.body and isinstance(node.body[0], ast.Expr):
                    yield node.body[0].value
                if isinstance(node, ast.FunctionDef):
                    yield from (d for d in node.args.defaults if _is_path(d))
            case ast.JoinedStr(values=values):
                yield from values
            case ast.Call(args=args):
                yield from (a for a in args[1:] if _is_path(a))


def _is_path(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value


def _makes_message(call: ast.Call) -> bool:
    """Return whether a call makes a message, with its type as `type` or as first argument.

    Its keywords are then fields.
    """
    first = call.args[0] if call.args else None
    return any(k.arg == "type" for k in call.keywords) or isinstance(first, ast.JoinedStr) or _is_path(first or call)


def _modules(source: str) -> list[Path]:
    path = SRC / source
    return [path] if path.suffix else [p for p in sorted(path.glob("*.py")) if p.name != "__init__.py"]


# Names of sessions and of JSON schemas that a dialect translates, so that they are not on its wire.
TRANSLATED = {
    "protocols/gemini": frozenset(
        [
            "any_of",
            "assistant",
            "camel",
            "cancelled",
            "function_call",
            "function_call_output",
            "high",
            "input_image",
            "input_text",
            "invalid_json",
            "invalid_value",
            "listen_only",
            "low",
            "max_items",
            "max_length",
            "min_items",
            "min_length",
            "null",
            "nullable",
            "output_text",
            "properties",
            "property_ordering",
            "type",
            "unsupported_parameter",
        ]
    ),
    "protocols/openai_live": frozenset({"session_expired"}),
}


@pytest.mark.parametrize("source", SOURCES)
def test_what_a_dialect_sends_and_takes_is_on_its_page(source: str) -> None:
    text = "\n".join(page(name) for name in SOURCES[source])
    own = TRANSLATED.get(source, frozenset())
    for module in _modules(source):
        for name, line in names(ast.parse(module.read_text(encoding="utf-8"))).items():
            known = name in INTERNAL | own or name.startswith(OLDER_PARAMS) or says(text, name)
            assert known, f"{module.name}:{line}: {name!r} is not in {', '.join(SOURCES[source])}.md"


def test_every_dialect_has_a_page() -> None:
    folders = {p.name for p in (SRC / "protocols").iterdir() if p.is_dir() and any(p.glob("[!_]*.py"))}
    assert folders == {s.split("/")[1] for s in SOURCES if s.startswith("protocols/")} - {"negotiation.py", "resume.py"}
    assert {name for names in SOURCES.values() for name in names} == {p.stem for p in PAGES.glob("*.md")}


# Messages that a client may send, each with the page that documents it.
MESSAGES: dict[str, Any] = {
    "vllm-realtime": VllmMessage,
    "openai-transcription": TranscriptionMessage,
    "openai-realtime": ConversationInput,
    "duplex": DuplexMessage,
}
EVENTS = {
    "vllm-realtime": tuple(FIELDS),
    "duplex": tuple(SIGNALLED),
} | dict.fromkeys(("openai-transcription", "openai-realtime"), ())


def events(name: str) -> tuple[str, ...]:
    return (*EVENTS[name], *(str(kind.__struct_config__.tag) for kind in get_args(MESSAGES[name])))


@pytest.mark.parametrize(("name", "event"), [(name, event) for name in MESSAGES for event in events(name)])
def test_every_event_of_a_client_is_documented(name: str, event: str) -> None:
    assert f"`{event}`" in page(name)


# --- recorded traces

# Objects whose keys clients or models choose, not the server.
FREE = {"parameters", "metadata", "payload", "arguments", "sha256", "model_info"}
SHARED = ("index",)
REALTIME = ("openai-realtime", "openai-transcription", "vllm-realtime")
BY_PATH: dict[str, tuple[str, ...]] = {
    "/v1/duplex": ("duplex", "openai-realtime"),
    "/v1/omni": ("bridges",),
    "/ws/duplex": ("bridges",),
    "/ws/google.ai.generativelanguage.v1beta.GenerativeService.BidiGenerateContent": ("gemini-live",),
    "/v1/live/sessions": ("openai-live",),
    "/v1/audio/speech/stream": ("speech-stream",),
    "/v1/video/chat/stream": ("video-stream",),
    "/v1/chat/completions": ("chat-completions",),
    "/v1/audio/transcriptions": ("transcriptions",),
    "/v1/audio/translations": ("transcriptions",),
    "/v1/audio/speech": ("speech",),
    "/v1/audio/speech/batch": ("speech",),
    "/v1/audio/voices": ("speech",),
    "/v1/telephone/calls": ("telephone",),
    "/v3/ws": ("assemblyai",),
    "/tts/websocket": ("cartesia",),
    "/tts/bytes": ("cartesia",),
    "/tts/sse": ("cartesia",),
    "/stt/websocket": ("cartesia",),
    "/stt/turns/websocket": ("cartesia",),
    "/v1/speech-to-text": ("elevenlabs",),
    "/v1/speech-to-text/realtime": ("elevenlabs",),
    "/v1/voices": ("elevenlabs",),
    "/v1/convai/conversation": ("elevenlabs", "elevenlabs-agents"),
    "/v1/listen": ("deepgram",),
    "/v2/listen": ("deepgram",),
    "/v1/speak": ("deepgram",),
    "/v1/agent/converse": ("deepgram", "deepgram-agent"),
    "/v1/realtime/client_secrets": ("client-secrets", *REALTIME),
    "/v1/realtime/sessions": ("client-secrets", *REALTIME),
    "/health": ("bridges",),
}


def pages_of(url: str) -> tuple[str, ...]:
    """Return the pages that document an endpoint."""
    path, query = urlsplit(url).path, parse_qs(urlsplit(url).query)
    if path == "/v1/realtime" and "duplex" in query:
        path = "/v1/duplex"
    if path == "/v1/realtime" and "mode" in query:
        path = "/v1/omni"
    if path.startswith(("/v1/text-to-speech/", "/v1/voices/")):
        path = "/v1/speech-to-text"
    # A session of any kind can be resumed at /v1/realtime.
    more = BY_PATH["/v1/duplex"] if "resume" in query else ()
    return (*SHARED, *more, *(REALTIME if path == "/v1/realtime" else BY_PATH.get(path, ())))


def keys(value: Any) -> Iterator[str]:
    """Return all keys of a JSON value that the server chose."""
    if isinstance(value, list):
        for element in value:
            yield from keys(element)
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            if key not in FREE:
                yield from keys(inner)


def sent(lines: list[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Return the server's JSON messages in a trace, each with its URL."""
    # URLs by the number of the socket. Requests and the first socket have no number.
    urls: dict[int | None, str] = {}
    asked = ""
    for line in lines:
        number = line.get("socket")
        if opened := line.get("opens"):
            urls[number] = asked = opened
        elif "requests" in line:
            asked = line["requests"].split()[1]
        elif line["from"] == "server" and "type" in line:
            yield urls[number], {k: v for k, v in line.items() if k not in ("at", "from", "socket", "spaced")}
        elif line["from"] == "server":
            yield from ((asked, b) for b in (line.get("body"), line.get("data")) if isinstance(b, dict))


@pytest.mark.parametrize("trace", sorted(file.stem for file in RECORDED.glob("*.jsonl")))
def test_every_frame_of_the_traces_is_documented(trace: str) -> None:
    lines = [json.loads(line) for line in (RECORDED / f"{trace}.jsonl").read_text(encoding="utf-8").splitlines()]
    # Skips repeated frames, because traces contain the same frames many times.
    names = {(url, frame.get("type"), key) for url, frame in sent(lines) for key in (None, *keys(frame))}
    for url, kind, key in names:
        text = "\n".join(page(name) for name in pages_of(url))
        if key is None:
            assert kind is None or says(text, kind) or says(text, f"….{kind.rpartition('.')[2]}"), f"{url}: {kind}"
        else:
            assert says(text, key), f"{url}: {kind}: {key}"


# --- the pages


def headings(text: str) -> list[str]:
    """Return the headings below the title, outside of fenced blocks."""
    outside = "".join(text.split(FENCE)[::2])
    return re.findall(r"^##+ (.+)$", outside, re.MULTILINE)


@pytest.mark.parametrize("name", sorted(p.stem for p in PAGES.glob("*.md") if p.stem != "index"))
def test_the_pages_have_one_shape(name: str) -> None:
    parts = [part for h in headings(page(name)) for part in SHAPE if h.startswith(part)]
    # The parts that each dialect has on a page that several dialects share.
    assert parts == list(SHAPE) * (len(parts) // len(SHAPE))
    assert parts


def test_the_index_has_all_pages() -> None:
    text = page("index")
    for file in PAGES.glob("*.md"):
        assert file.stem == "index" or f"({file.name})" in text


def test_every_command_is_on_the_page_of_examples() -> None:
    for name in COMMANDS:
        assert f"antiphon {name}" in (PAGES.parent / "use.md").read_text(encoding="utf-8")


# --- all text


def tracked() -> list[Path]:
    """Return the Markdown and Python files that git tracks."""
    listed = subprocess.run(["git", "ls-files", "*.md", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no checkout")
    return [ROOT / name for name in listed.stdout.splitlines()]


def test_no_line_of_a_page_is_wide() -> None:
    # Ruff checks the Python files (E501).
    wide = []
    for file in (f for f in tracked() if f.suffix == ".md"):
        name = file.relative_to(ROOT).as_posix()
        if not file.exists():
            continue
        lines = enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        wide += [f"{name}:{number}: {len(line)}" for number, line in lines if len(line) > WIDTH]
    assert not wide, "\n".join(wide)


def test_each_benchmark_that_is_named_can_be_run() -> None:
    named = set()
    for file in (f for f in tracked() if f.suffix in (".md", ".py") and f.exists()):
        named |= set(re.findall(r"antiphon bench ([a-z0-9]+)", file.read_text(encoding="utf-8")))
    assert named - set(BENCHMARKS) == set()
    assert {name for name in BENCHMARKS if not (ROOT / "bench" / f"{name}.py").exists()} == set()
