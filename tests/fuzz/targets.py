"""The targets of fuzzing.

There are three groups of targets:

- the connection of each dialect,
- the parsers of REST bodies, forms, media headers, telephones' media streams, recordings, schemas, stored sessions and
  answers of other servers,
- requests to all routes of a host, directly and through a door.

A target reads one input after another. For each input, it returns an answer or raises an error of `antiphon.errors`.
Any other error is a bug that the fuzzing has found.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import io
import json
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import av
import numpy as np
import psutil
from PIL import Image

from antiphon.audio.containers import decode_in_slabs, measure_s
from antiphon.audio.incoming import IncomingAudio
from antiphon.audio.wav import wav_header
from antiphon.engine.api import Grammar
from antiphon.engine.grammar_trial import TRIALS
from antiphon.errors import AntiphonError, RemoteProtocolError, StoreError
from antiphon.events.conversation import ContentPart, Item
from antiphon.events.data_uri import decode_image_uri
from antiphon.events.duplex import ConversationPaused
from antiphon.loading.loaded import LoadedModels
from antiphon.protocols.cartesia.speaking import CartesiaStreams
from antiphon.protocols.connection import Context, WireConnection
from antiphon.protocols.deepgram.query import DeepgramQuery
from antiphon.protocols.deepgram.speak import SpeakConnection, SpeakQuery, voice_finder
from antiphon.protocols.dialects import dialect_of
from antiphon.protocols.elevenlabs.streams import ElevenLabsStreams
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.opening import Opening
from antiphon.protocols.rest import chat, transcription_form
from antiphon.protocols.speech import rest as speech
from antiphon.protocols.speech.fields import SpeechCatalog
from antiphon.protocols.speech.stream import SpeechDialect
from antiphon.protocols.telephony.sip import messages as sip
from antiphon.protocols.telephony.sip import rtp, sdp
from antiphon.protocols.telephony.sip.digest import params_of
from antiphon.protocols.video.stream import VideoDialect
from antiphon.protocols.wire import Received, random_id
from antiphon.recording.tape import Tape, marks, turns
from antiphon.remote import sse
from antiphon.remote.chat.chat_completions import ChatReader
from antiphon.remote.chat.responses import ResponsesReader
from antiphon.server.credentials import Caller
from antiphon.server.live.moving.persistence import restored, stored_session
from antiphon.server.live.moving.resume_point import ResumePoint
from antiphon.server.live.open_wire import context_of
from antiphon.server.metrics import Metrics
from antiphon.server.routes import client_secrets
from antiphon.server.state import ServerState
from antiphon.settings import Settings
from antiphon.store.sessions import StoredSession
from antiphon.transports.journal import ResumeToken
from antiphon.vision import images
from tests.fuzz import media, schemas, wire
from tests.fuzz.mutations import mutated_bytes, mutated_frame, mutated_text, recorded_bodies, recorded_frames
from tests.scripted import ScriptedDetector, ScriptedTranscriber
from tests.server.scripted import Echo

GEMINI = "/ws/google.ai.generativelanguage.v1beta.GenerativeService.BidiGenerateContent"
CATALOG = SpeechCatalog(
    ModelNames(("hibari-heart",)),
    ("heart", "emma"),
    ("en",),
    clones=False,
    uploaded=lambda name: None,
    check_url=lambda url, param: None,
    log_alias=lambda name, model: None,
)
# Messages of clients of hosted services. Some have no `type`, by which recorded frames are found.
TEXTS: tuple[dict[str, Any], ...] = (
    {"text": " ", "voice_settings": {"speed": 1.1}, "generation_config": {"chunk_length_schedule": [50]}},
    {"text": "Hello there. ", "context_id": "a", "flush": True},
    {"context_id": "a", "close_context": True},
    {"text": "", "context_id": "b"},
    {"close_socket": False},
)
GENERATIONS: tuple[dict[str, Any], ...] = (
    {
        "context_id": "a",
        "model_id": "sonic-3",
        "transcript": "Hello. ",
        "continue": True,
        "flush": True,
        "voice": {"mode": "id", "id": "heart"},
        "output_format": {"container": "raw", "encoding": "pcm_f32le", "sample_rate": 44_100},
        "generation_config": {"speed": 1.5},
    },
    {"context_id": "a", "cancel": True},
)
HOSTED: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/speech-to-text/realtime?commit_strategy=vad": (
        {"message_type": "input_audio_chunk", "audio_base_64": "AAAA", "commit": True, "sample_rate": 16_000},
        {"message_type": "commit"},
    ),
    "/v1/convai/conversation?agent_id=agent_1": (
        {"user_audio_chunk": "AAAA"},
        {
            "type": "conversation_initiation_client_data",
            "conversation_config_override": {
                "agent": {
                    "prompt": {"prompt": "{{a}}", "tools": [{"name": "a"}]},
                    "first_message": "Hi.",
                    "language": "en",
                },
                "tts": {"voice_id": "heart", "speed": 1.1, "agent_output_audio_format": "ulaw_8000"},
                "asr": {"keywords": ["a"], "user_input_audio_format": "pcm_8000"},
                "conversation": {"text_only": False, "client_events": ["audio"]},
            },
            "dynamic_variables": {"a": 1},
        },
        {
            "type": "enclave_setup_config",
            "agent_config_dict": {"conversation_config": {"agent": {"language": "de"}}},
            "override_agent_config_list": [{"text_only": True}],
            "tools_config_list": [{"tool_config": {"type": "client", "name": "a", "parameters": {"type": "object"}}}],
        },
        {"type": "user_message", "text": "a"},
        {"type": "multimodal_message", "text": {"type": "user_message", "text": "a"}, "files": []},
        {"type": "contextual_update", "text": "a"},
        {"type": "client_tool_result", "tool_call_id": "a", "result": {"a": 1}, "is_error": True},
        {"type": "pong", "event_id": 0},
    ),
    "/v3/ws?sample_rate=8000&encoding=pcm_mulaw": (
        {"type": "UpdateConfiguration", "vad_threshold": 0.5, "max_turn_silence": 400, "keyterms_prompt": ["a"]},
        {"type": "ForceEndpoint"},
        {"type": "KeepAlive"},
    ),
    "/stt/turns/websocket?encoding=pcm_f32le": ({"type": "config"}, {"type": "finalize"}),
    "/stt/websocket?encoding=pcm_alaw&sample_rate=8000": ({"type": "finalize"},),
}
RAW_AUDIO = "encoding=linear16&sample_rate=16000&interim_results=true"
LIVE = "/v1/live/sessions"
# Messages for a session that is paused. The audio is 0, 3, and 4800 bytes long.
OF_A_PAUSE: tuple[dict[str, Any], ...] = (
    *({"type": "session.input_audio.append", "audio": audio} for audio in ("", "AAAA", "gH8B" * 1600)),
    *({"type": f"session.{name}"} for name in ("input_audio.mute", "input_audio.unmute", "pause", "wake")),
    {"type": "session.update", "session": {"delegation": {"type": "client"}}},
)
Input = str | bytes
SIP_OFFER, SIP_INVITE = (
    b"INVITE sip:bot@192.0.2.4 SIP/2.0\r\nVia: SIP/2.0/UDP 192.0.2.1:5060;branch=z9hG4bK1;rport, SIP/2.0/TCP a;branch=b"
    b'\r\nf: "A, <b>" <sip:a@192.0.2.1>;tag=1\r\nTo: <sip:bot@192.0.2.4>\r\nCall-ID: c\r\nCSeq: 1 INVITE\r\n'
    b'Contact: <sip:a@[2001:db8::1]:5070;transport=tcp>\r\nAuthorization: Digest realm="r", nonce="n", qop=auth\r\n'
    b"Content-Type: application/sdp\r\n\r\n" + body
    for body in (
        b"v=0\r\nc=IN IP4 192.0.2.1\r\nm=audio 4000 RTP/SAVP 0 96 101\r\na=rtpmap:96 opus/48000/2\r\n"
        b"a=crypto:1 AES_CM_128_HMAC_SHA1_80 inline:d0RmdmcmVCspeEc3QGZiNWpVLFJhQX1cfHAwJSoj|2^20\r\n"
        b"a=rtpmap:101 telephone-event/8000\r\na=sendonly\r\nm=video 5000 RTP/AVP 99\r\n",
        b"",
    )
)
# Number of inputs per round for targets whose inputs cost a hundred times, and ten times, as much as those of others.
SLOW, COSTLY = 0.5, 5


@dataclass(frozen=True, slots=True)
class Target:
    """A part of the server that reads inputs.

    `new` makes a reader of inputs, which returns the answer to the client as text. `draw` makes an input. `per_round`
    is the number of inputs in each round, which is smaller for expensive targets. Each round makes a new reader.
    """

    new: Callable[[], Callable[[Input], str]]
    draw: Callable[[random.Random], Input]
    per_round: float = 50


def context() -> Context:
    count = iter(range(10**9))
    return Context(
        models=ModelNames(("whisper-base",)),
        conversation_models=ModelNames(("qwen",)),
        voices=("heart",),
        now_s=lambda: 1.0,
        steady_s=lambda: 0.0,
        new_id=lambda prefix: f"{prefix}{next(count)}",
    )


def connection(path: str) -> Callable[[Input], str]:
    """Open a connection in the dialect of a URL. Return the function that reads the connection's inputs."""
    url = urlsplit(path)
    query = {name: values[0] for name, values in parse_qs(url.query).items()}
    opening = Opening(
        query=tuple(parse_qsl(url.query)),
        dialect=query.get("dialect", ""),
        intent=query.get("intent", ""),
        duplex="duplex" in query,
        path=url.path,
        mode=query.get("mode", ""),
    )
    wire: WireConnection = dialect_of(opening).connect(opening, context())
    wire.open()

    def feed(data: Input) -> str:
        with suppress(RemoteProtocolError):
            wire.control(data)
        return answers(wire.feed(data))

    return feed


def paused_session() -> Callable[[Input], str]:
    """Open a session of OpenAI Live that is paused. Return the function that reads its inputs."""
    opening = Opening(path=LIVE)
    wire: WireConnection = dialect_of(opening).connect(opening, context())
    wire.open()
    wire.feed('{"type": "session.start", "session": {"model": "gpt-live-1", "idle_timeout_s": 1}}')
    wire.send(ConversationPaused())
    return lambda data: answers(wire.feed(data))


def elevenlabs(*, multi: bool) -> ElevenLabsStreams:
    """Return a connection with texts to speak, whose clock stands still."""
    return ElevenLabsStreams("heart", {"output_format": "pcm_16000"}, CATALOG, lambda: 0.0, multi=multi)


def mixed(seeds: Sequence[dict[str, Any]]) -> Callable[[random.Random], Input]:
    """Draw mutated messages, and binary frames of any bytes and length."""

    def draw_message(draw: random.Random) -> Input:
        if draw.random() < 0.1:
            return draw.randbytes(draw.choice((0, 1, 2, 641)))
        text = mutated_frame(seeds, draw)
        return mutated_bytes(text.encode(), draw) if draw.random() < 0.05 else text

    return draw_message


def stream(
    dialect: SpeechDialect | SpeakConnection | VideoDialect | ElevenLabsStreams | CartesiaStreams,
) -> Callable[[Input], str]:
    return lambda data: answers(dialect.feed(data))


def answers(received: Received[Any]) -> str:
    """Return the frames that answer an input. Raises AssertionError if an error has no explanation."""
    frames = [frame.encode() for frame in received.answers]
    for frame in frames:
        reported = json.loads(frame)
        if reported.get("type") == "error":
            error = reported.get("error") or reported.get("error_event") or reported.get("message")
            assert error if isinstance(error, str) else error["message"] and error.get("code", "") != "internal_error"
    return "".join(map(str, frames))


def raising(parse: Callable[[Any], object]) -> Callable[[], Callable[[Input], str]]:
    """Return a function that makes readers that parse inputs. Errors of the project's own types count as answers."""

    def read(data: Input) -> str:
        try:
            parse(data)
        except AntiphonError as error:
            return str(error)
        return ""

    return lambda: read


def frames_of(paths: list[str]) -> Callable[[random.Random], Input]:
    seeds = [frame for path in paths for frame in recorded_frames()[path]]

    def draw_frame(draw: random.Random) -> Input:
        text = mutated_frame(seeds, draw)
        return mutated_bytes(text.encode(), draw) if draw.random() < 0.05 else text

    return draw_frame


def bodies_of(path: str) -> Callable[[random.Random], Input]:
    seeds = recorded_bodies()[path]
    return lambda draw: mutated_frame(seeds, draw).encode()


def one_of(seeds: list[bytes]) -> Callable[[random.Random], Input]:
    return lambda draw: mutated_bytes(draw.choice(seeds), draw)


def sounds() -> list[bytes]:
    """Return a tenth of a second of audio in each container format that clients send."""
    found = []
    for name, codec in (("wav", "pcm_s16le"), ("flac", "flac"), ("ogg", "libopus"), ("mp3", "libmp3lame")):
        out = io.BytesIO()
        with av.open(out, "w", format=name) as container:
            track = container.add_stream(codec, rate=48_000, layout="mono")
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 4800), np.int16), format="s16", layout="mono")
            frame.sample_rate = 48_000
            container.mux(track.encode(frame))
            container.mux(track.encode(None))
        found.append(out.getvalue())
    return found


def pictures() -> list[bytes]:
    found = []
    for kind in ("png", "jpeg", "webp", "gif", "bmp"):
        out = io.BytesIO()
        Image.new("RGB", (24, 16), (200, 30, 30)).save(out, kind)
        found.append(out.getvalue())
    return found


def read_image_uri(text: str) -> None:
    # The parser raises ValueError with the reason. Its callers add the name of the field.
    with suppress(ValueError):
        decode_image_uri(text)


def read_sound(data: bytes) -> None:
    measure_s(io.BytesIO(data), 60.0)
    for _ in decode_in_slabs(io.BytesIO(data), 30.0):
        pass


def read_sip(data: Input) -> None:
    """Read a message of a telephone and its description, and write the answers to both."""
    raw = data.encode() if isinstance(data, str) else data
    message = sip.parse(raw)
    if isinstance(message, sip.SipRequest):
        sip.parse(sip.answer(message, 401, tag="a").encode())
        params_of(message.get("authorization"))
        for value in message.all("contact"):
            sip.SipUri.read(sip.Address.read(value).uri)
    theirs = sdp.read(message.body)
    if agreed := sdp.agree(theirs, tuple(sdp.CLOCKS_HZ)):
        sdp.read(sdp.answer(theirs, agreed, ("192.0.2.1", 4000), 1, theirs.crypto[0] if theirs.crypto else None))


def read_rtp(data: Input) -> None:
    packet = rtp.read(data.encode() if isinstance(data, str) else data)
    rtp.RtpOrder().put(packet)
    rtp.KeyReader().read(packet)


def draw_form(draw: random.Random) -> Input:
    names = (
        "model",
        "language",
        "prompt",
        "response_format",
        "temperature",
        "timestamp_granularities[]",
        "stream",
        "chunking_strategy",
        "chunking_strategy[type]",
        "chunking_strategy[threshold]",
        "chunking_strategy[",
        "x",
    )
    values = (
        *("default", "en", "", "verbose_json", "srt", "0.5", "nan", "1e400", "word", "true", "\0", "a" * 500),
        *("auto", "null", "server_vad", '{"type":"server_vad"}', '{"type":"server_vad","threshold":1e400}', "[" * 9999),
    )
    form = {
        draw.choice(names): [draw.choice(values) for _ in range(draw.randrange(3))] for _ in range(draw.randrange(6))
    }
    return json.dumps(form)


def draw_voice(draw: random.Random) -> Input:
    names = ("name", "consent", "ref_text", "speaker_embedding", "overwrite", "x")
    values = ("a", "yes", "", "[1, 2]", "[1e400]", "[null]", "nan", "../x", "\0", "{}", "\ud800", "a" * 3000)
    return json.dumps({draw.choice(names): draw.choice(values) for _ in range(draw.randrange(6))})


def draw_image_uri(draw: random.Random) -> Input:
    return mutated_text("data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAAB", draw)


# One event of each kind that a timeline reads, with the fields that it uses.
FRAMES_OF_THE_SERVER: tuple[dict[str, Any], ...] = (
    {"type": "input_audio_buffer.speech_started", "item_id": "item_1", "audio_start_ms": 10},
    {"type": "input_audio_buffer.committed", "item_id": "item_1"},
    {"type": "conversation.item.input_audio_transcription.completed", "item_id": "item_1", "transcript": "a"},
    {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress"}},
    {"type": "response.output_audio.delta", "response_id": "resp_1", "item_id": "item_2", "delta": "AAAA"},
    {"type": "response.done", "response": {"id": "resp_1", "status": "completed", "output": []}},
)


@functools.cache
def scripted_state() -> ServerState:
    """Return a server's state with a transcriber and a conversation model."""
    heard, answers = ScriptedTranscriber(), Echo()
    return ServerState(
        Settings(),
        Metrics(),
        LoadedModels(
            transcriber=heard,
            vad=ScriptedDetector(),
            turn_detector=None,
            language_model=None,
            synthesizer=None,
            image_reader=None,
            conversation_model=answers,
            video_model=None,
            names=("scripted",),
            lanes=(),
        ),
    )


@functools.cache
def snapshots() -> tuple[Any, ...]:
    """Return the stored rows of two conversations, as JSON."""
    found = []
    for door in ("/v1/realtime", "/v1/duplex"):
        opening = Opening(path=door)
        wire = dialect_of(opening).connect(opening, context_of(scripted_state(), Caller()))
        wire.open()
        wire.feed('{"type": "session.update", "session": {"type": "realtime", "instructions": "Be brief."}}')
        item = Item("item_1", "message", role="user", parts=[ContentPart("input_text", "Hi.")])
        row = stored_session(Caller(), wire, ResumeToken(), [item], ResumePoint())
        assert row
        found.append(json.loads(row.snapshot))
    return tuple(found)


def draw_row(draw: random.Random) -> Input:
    row = mutated_frame(snapshots(), draw).encode()
    return mutated_bytes(row, draw) if draw.random() < 0.1 else row


def row_reader() -> Callable[[Input], str]:
    """Return a reader for the stored row of a conversation that outlived its server."""
    state = scripted_state()

    def read(data: Input) -> str:
        raw = data.encode() if isinstance(data, str) else data
        try:
            _, items, _ = restored(state, Caller(), StoredSession("sess-1", "", b"", raw))
        except (StoreError, RemoteProtocolError) as error:
            return str(error)
        return str(len(items))

    return read


def read_tape(data: Input) -> str:
    """Read a recorded session. The first line of the input has its facts, and the other lines its events."""
    raw = data.encode() if isinstance(data, str) else data
    facts, _, events = raw.partition(b"\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in.wav").write_bytes(wav_header(16_000, 320) + bytes(320))
        (folder / "session.json").write_bytes(facts)
        (folder / "events.jsonl").write_bytes(events)
        try:
            tape = Tape.read(folder)
        except StoreError as error:
            return str(error).replace(name, "")
    marks(tape.outputs())
    turns(tape.outputs())
    return str(len(tape.entries))


def _sockets() -> dict[str, Target]:
    """Return every dialect, by its path. All recorded paths of one dialect share their frames."""
    paths = list(recorded_frames())
    doors = {
        "/v1/realtime": [p for p in paths if p.startswith("/v1/realtime") and "mode=" not in p and "duplex" not in p],
        "/v1/realtime?intent=transcription": [p for p in paths if "intent=transcription" in p],
        "/v1/realtime?dialect=vllm": [p for p in paths if "dialect=vllm" in p],
        "/v1/duplex": [p for p in paths if p.startswith("/v1/duplex") or "duplex=1" in p],
        "/v1/omni": [p for p in paths if p.startswith("/v1/omni")],
        "/v1/realtime?mode=audio": [p for p in paths if "mode=audio" in p],
        "/ws/duplex": [p for p in paths if p == "/ws/duplex"],
        f"/v1/listen?{RAW_AUDIO}": [p for p in paths if p.startswith("/v1/listen")],
        f"/v2/listen?{RAW_AUDIO}": [p for p in paths if p.startswith("/v2/listen")],
        LIVE: [p for p in paths if p == LIVE],
        GEMINI: [p for p in paths if p == GEMINI],
        "/v1/agent/converse": [p for p in paths if p == "/v1/agent/converse"],
    }
    found = {door: Target(functools.partial(connection, door), frames_of(seeds)) for door, seeds in doors.items()}
    return found | {door: Target(functools.partial(connection, door), mixed(seeds)) for door, seeds in HOSTED.items()}


def read_query(data: Input) -> None:
    """Open each of Deepgram's connections with a query."""
    pairs = parse_qsl(data if isinstance(data, str) else data.decode(errors="replace"))
    for path in ("/v1/listen", "/v2/listen"):
        opening = Opening(path=path, query=tuple(pairs))
        with suppress(RemoteProtocolError):
            dialect_of(opening).connect(opening, context()).open()
    with suppress(RemoteProtocolError):
        deepgram_speech(DeepgramQuery(pairs))


def draw_query(draw: random.Random) -> Input:
    names = (
        *("model", "encoding", "sample_rate", "channels", "multichannel", "language", "interim_results", "endpointing"),
        *("utterance_end_ms", "diarize", "keyterm", "keywords", "eot_threshold", "eot_timeout_ms", "redact", "speed"),
        *("eager_eot_threshold", "container", "detect_language", "x"),
    )
    values = (
        *("nova-3", "linear16", "opus", "flac", "mp3", "wav", "16000", "true", "false", "0", "-1", "0.7", "nan", "inf"),
        *("1e400", "1e9", "multi", "en-US", "tlh", "", "\0", "a" * 300, "\ud800".encode("utf-8", "replace").decode()),
    )
    return urlencode([(draw.choice(names), draw.choice(values)) for _ in range(draw.randrange(9))])


def deepgram_speech(query: DeepgramQuery) -> SpeakConnection:
    find = voice_finder(CATALOG.voices, CATALOG.languages, CATALOG.models.lenient, CATALOG.log_alias)
    return SpeakConnection(SpeakQuery(query, find, live=True), "hibari-heart", random_id)


def read_pieces(data: Input) -> None:
    """Decode a container that arrives in pieces of a few bytes."""
    incoming = IncomingAudio("container")
    raw = data if isinstance(data, bytes) else data.encode()
    for at in range(0, len(raw), 997):
        incoming.feed(raw[at : at + 997])
    incoming.flush()


def _streams() -> dict[str, Target]:
    said = [p for p in recorded_frames() if p.startswith("/v1/speak")]
    spoken = [p for p in recorded_frames() if p.startswith("/v1/audio/speech/stream")]
    watched = [p for p in recorded_frames() if p.startswith("/v1/video/chat/stream")]
    return {
        "paused session": Target(paused_session, mixed(OF_A_PAUSE)),
        "speech stream": Target(lambda: stream(SpeechDialect(CATALOG)), frames_of(spoken)),
        "elevenlabs": Target(lambda: stream(elevenlabs(multi=False)), mixed(TEXTS)),
        "elevenlabs contexts": Target(lambda: stream(elevenlabs(multi=True)), mixed(TEXTS)),
        "cartesia speech": Target(lambda: stream(CartesiaStreams(CATALOG)), mixed(GENERATIONS)),
        "/v1/speak": Target(lambda: stream(deepgram_speech(DeepgramQuery([]))), frames_of(said)),
        "queries of Deepgram's clients": Target(raising(read_query), draw_query),
        "containers in pieces": Target(raising(read_pieces), one_of(sounds()), COSTLY),
        "video stream": Target(lambda: stream(VideoDialect(lambda: 0.0)), frames_of(watched)),
    }


def _tape_lines(draw: random.Random) -> Input:
    facts = {"version": 1, "id": "sess-1", "began": 1, "opening": {}, "models": ["a"]}
    rows = [{"t": 0.5, "out": frame} for frame in FRAMES_OF_THE_SERVER] + [
        {"t": 1, "sound": [0, 160]},
        {"t": 2, "in": {}},
    ]
    lines = [json.dumps(facts) if draw.random() < 0.9 else mutated_frame([facts], draw)]
    return "\n".join([*lines, *(mutated_frame(rows, draw) for _ in range(5))])


def _try_grammar(data: str | bytes) -> None:
    """Compile a schema as the server does, in a process with a time limit. A child process that remains is a find."""
    TRIALS.check(Grammar("json_schema", data if isinstance(data, str) else data.decode(errors="replace")))
    assert not any(psutil.Process(pid).children() for pid in TRIALS.pids)


# Events of another server's answer, by the API that the server speaks.
CHAT_EVENTS: tuple[dict[str, Any], ...] = (
    {"choices": [{"index": 0, "delta": {"content": "Hi <think>no</think> [{"}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f"}}]}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1}},
    {"error": {"message": "no", "code": 400}},
)
RESPONSE_EVENTS: tuple[dict[str, Any], ...] = (
    {"type": "response.output_text.delta", "delta": "Hi ```json [", "output_index": 0},
    {"type": "response.output_item.added", "output_index": 1, "item": {"type": "function_call", "name": "f"}},
    {"type": "response.function_call_arguments.delta", "output_index": 1, "delta": "{}"},
    {"type": "response.completed", "response": {"usage": {"input_tokens": 1, "output_tokens": 1}}},
    {"type": "error", "message": "no"},
)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    atexit.register(loop.close)
    return loop


async def _events_of(raw: bytes) -> list[bytes]:
    """Return the events that are read from a stream in pieces of a few bytes."""

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(raw), 37):
            yield raw[at : at + 37]

    return [event async for event in sse.events(pieces())]


def _answers_of_servers() -> dict[str, Target]:
    """Return streams of events like those of language model servers. Each input is a whole stream."""

    def draw_stream(seeds: tuple[dict[str, Any], ...]) -> Callable[[random.Random], Input]:
        def draw_it(draw: random.Random) -> Input:
            lines = [f"data: {mutated_frame(seeds, draw)}" for _ in range(draw.randrange(1, 7))]
            text = "\n\n".join([*lines, "data: [DONE]"]) + "\n\n"
            return mutated_text(text, draw) if draw.random() < 0.1 else text

        return draw_it

    def reading(make: Callable[[], Any]) -> Callable[[], Callable[[Input], str]]:
        def read_stream(data: Input) -> str:
            raw = data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass")
            answer = make()
            try:
                for event in _loop().run_until_complete(_events_of(raw)):
                    list(answer.feed(event))
                list(answer.end())
            except AntiphonError as error:
                return str(error)
            return ""

        return lambda: read_stream

    return {
        "chat answer": Target(reading(ChatReader), draw_stream(CHAT_EVENTS)),
        "response answer": Target(reading(ResponsesReader), draw_stream(RESPONSE_EVENTS)),
    }


TARGETS: Mapping[str, Target] = {
    **_sockets(),
    **_streams(),
    **_answers_of_servers(),
    **{name: Target(media.reader(make), draw) for name, (make, draw) in media.STREAMS.items()},
    "host": Target(lambda: wire.asking(False), wire.draw_request, per_round=COSTLY),
    "door": Target(lambda: wire.asking(True), wire.draw_request, per_round=COSTLY),
    "schema": Target(raising(_try_grammar), schemas.draw_grammar, per_round=COSTLY),
    "client secret": Target(
        raising(lambda data: client_secrets.parse(data, beta=False)), bodies_of("POST /v1/realtime/client_secrets")
    ),
    "chat": Target(raising(chat.parse), bodies_of("POST /v1/chat/completions")),
    "speech": Target(raising(lambda data: speech.parse(data, CATALOG)), bodies_of("POST /v1/audio/speech")),
    "speech batch": Target(
        raising(lambda data: speech.parse_batch(data, CATALOG)), bodies_of("POST /v1/audio/speech/batch")
    ),
    "transcription form": Target(
        raising(lambda data: transcription_form.parse_form(json.loads(data), ("en", "de"))), draw_form
    ),
    "voice form": Target(raising(lambda data: speech.parse_voice(json.loads(data), has_sample=True)), draw_voice),
    "image URI": Target(raising(read_image_uri), draw_image_uri),
    "image": Target(raising(images.decode), one_of(pictures()), per_round=SLOW),
    "tape": Target(lambda: read_tape, _tape_lines, per_round=SLOW),
    "stored session": Target(row_reader, draw_row),
    "sound": Target(raising(read_sound), one_of(sounds()), per_round=SLOW),
    "sip": Target(raising(read_sip), one_of([SIP_INVITE, SIP_OFFER])),
    "rtp": Target(raising(read_rtp), one_of([rtp.encode(rtp.RtpPacket(0, 7, 1120, 5, bytes(40), True))])),
}
