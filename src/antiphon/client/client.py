"""The client: the address of a server, and methods that open its sessions."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

from antiphon.client import captions, conversation, video
from antiphon.client.captions import ClientCaptions
from antiphon.client.conversation import ClientConversation, tools_of
from antiphon.client.held_speech import PATH as SPEECH_PATH
from antiphon.client.in_process import App, connect_in_process
from antiphon.client.link import Json, JsonObject, ResumingLink, SessionEnded
from antiphon.client.network import connect_over_network, trusting
from antiphon.client.speech import ClientSpeech
from antiphon.client.video import ClientVideo

DEFAULT_URL = "http://127.0.0.1:8000"
# Timeout of an HTTP request, in seconds: transcribing a file of several hours takes minutes.
REQUEST_S = 600.0
# Query parameter that declares the speaker's consent to being recorded (docs/keeping.md).
CONSENT = {"record": "1"}


class Client:
    """A client of one server. It is entered with `async with` and used from one event loop.

    Its methods return sessions, each of which is entered with `async with` too.

    Args:
        url: The server's address, such as http://127.0.0.1:8000.
        key: One of the server's API keys; None sends none.
        ca: For https://: the file of the certificates to trust (PEM), or a TLS context, such as that of `pinned`. None:
            the certificates that the system trusts.
        give_up_s: How long a session whose connection broke tries to reconnect, in seconds. By default the server keeps
            such a session for 30 s.
        app: The server's ASGI application in this process. The client then calls it directly, and `url` is only a name.

    Raises:
        ValueError: `url` is not an http:// or https:// address with a host, or `ca` has no certificate.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        key: str | None = None,
        *,
        ca: str | Path | ssl.SSLContext | None = None,
        give_up_s: float = 30.0,
        app: App | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the server's address must be http:// or https:// and a host, not {url}")
        self.url = parts.geturl().rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._give_up_s = give_up_s
        self._app = app
        self._tls = (ca if isinstance(ca, ssl.SSLContext) else trusting(ca)) if parts.scheme == "https" else None
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=self._headers,
            timeout=REQUEST_S,
            trust_env=False,
            verify=self._tls or True,
            transport=httpx.ASGITransport(app) if app else None,
        )

    async def __aenter__(self) -> Client:
        """Return this client. Does not connect."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    def conversation(
        self,
        *,
        instructions: str | None = None,
        voice: str | None = None,
        language: str | None = None,
        tools: Sequence[Callable[..., Any]] = (),
        rate_hz: int = 16_000,
        response_rate_hz: int = 24_000,
        speaks: bool = True,
        acknowledges: bool = False,
        turn_detection: JsonObject | None = None,
        consents: bool = False,
        session: JsonObject | None = None,
    ) -> ClientConversation:
        """Return a conversation, which is then entered with `async with`.

        Args:
            instructions: The model's system prompt.
            voice: The voice of the responses: a name that `antiphon voices` lists.
            language: The user's language, ISO 639-1; None: the server detects it.
            tools: Functions that the model may call (see FunctionTool).
            rate_hz: Sample rate of the user's audio.
            response_rate_hz: Sample rate of the responses' audio.
            speaks: False: responses are text only.
            acknowledges: True: only audio that the application reports as `played` counts as heard.
            turn_detection: How the server finds the end of a turn (docs/wire/duplex.md).
            consents: True: the speaker has agreed to be recorded.
            session: Any other fields of a session (docs/wire/duplex.md).

        Raises:
            TypeError: A function cannot be a tool (see FunctionTool).
            ValueError: `session` has `tools`.
        """
        if session and "tools" in session:
            raise ValueError("pass functions as `tools`, not in the session: their calls would get no output")
        functions = tools_of(tools)
        found: dict[str, Json] = {
            "input_audio_format": "pcm16",
            "sample_rate_hz": rate_hz,
            "audio": {"output": {"sample_rate_hz": response_rate_hz}},
            "playback_commit_policy": "ack_only" if acknowledges else "commit_all_on_done",
            **_given(instructions=instructions, voice=voice, turn_detection=turn_detection),
            **({} if speaks else {"modalities": ["text"]}),
            **({"tools": [f.definition() for f in functions]} if functions else {}),
            **(conversation.heard_in(language) if language else {}),
            **(session or {}),
        }
        opening: JsonObject = {"type": "session.update", "session": found}
        link = self._link(
            conversation.PATH,
            CONSENT if consents else None,
            opening=opening,
            heartbeat=conversation.HEARTBEAT,
            heartbeat_s=min(60.0, float(cast(float, found.get("idle_timeout_s", 120))) / 2),
        )
        return ClientConversation(link, functions)

    def captions(
        self,
        *,
        language: str | None = None,
        prompt: str | None = None,
        rate_hz: int = captions.RATE_HZ,
        model: str = "default",
        consents: bool = False,
    ) -> ClientCaptions:
        """Return a live transcription, which is then entered with `async with`.

        Args:
            language: The language, ISO 639-1; None: the server detects it.
            prompt: Names and words to expect.
            rate_hz: Sample rate of the audio.
            model: The model's name.
            consents: True: the speaker has agreed to be recorded.
        """
        config = {"model": model, **_given(language=language, prompt=prompt)}
        query = {"dialect": "vllm", "resume": "1", "keeps_words": "1", **(CONSENT if consents else {})}
        return ClientCaptions(partial(self._link, captions.PATH, query), config, rate_hz, self._give_up_s)

    def speech(
        self,
        *,
        voice: str | None = None,
        language: str | None = None,
        rate_hz: int | None = None,
        config: JsonObject | None = None,
    ) -> ClientSpeech:
        """Return a speech stream, which is then entered with `async with`.

        Args:
            voice: A name that `antiphon voices` lists.
            language: The language of the text, ISO 639-1.
            rate_hz: Sample rate of the audio; None: the sample rate of the voice.
            config: Any other fields of the configuration (docs/wire/speech-stream.md).
        """
        given = _given(voice=voice, language=language, sample_rate=rate_hz)
        link = self._link(SPEECH_PATH, {"resume": "1"})
        return ClientSpeech(link, {"response_format": "pcm", "stream_audio": True, **given, **(config or {})})

    def video(self, *, system_prompt: str | None = None, config: JsonObject | None = None) -> ClientVideo:
        """Return a video session, which is then entered with `async with`. Its answers are text.

        Args:
            system_prompt: The model's system prompt.
            config: Any other fields of the configuration (docs/wire/video-stream.md).
        """
        link = self._link(video.PATH, {"resume": "1"}, heartbeat={"type": "ping"}, heartbeat_s=20.0)
        fields = {"modalities": ["text"], **_given(system_prompt=system_prompt), **(config or {})}
        return ClientVideo(link, fields)

    async def transcribe(self, file: str | Path | bytes, *, language: str | None = None, model: str = "default") -> str:
        """Return the transcript of an audio file.

        Args:
            file: The file's path, or its contents. The format may be any that the server decodes.
            language: The language, ISO 639-1; None: the server detects it.
            model: The model's name.

        Raises:
            SessionEnded: The server refuses the file or cannot be reached.
            OSError: The file cannot be read.
        """
        data = file if isinstance(file, bytes) else await asyncio.to_thread(Path(file).read_bytes)
        fields = {"model": model, **_given(language=language)}
        answer = await self._post("/v1/audio/transcriptions", data=fields, files={"file": ("audio", data)})
        return str(answer.json()["text"])

    async def speak(self, text: str, *, voice: str | None = None, response_format: str = "wav") -> bytes:
        """Return a text as a file of speech.

        Args:
            text: The text to speak.
            voice: A name that `antiphon voices` lists.
            response_format: The format of the file, such as "wav" or "mp3".

        Raises:
            SessionEnded: The server refuses the request or cannot be reached.
        """
        body = {"model": "default", "input": text, "response_format": response_format, **_given(voice=voice)}
        return (await self._post("/v1/audio/speech", json=body)).content

    async def _post(self, path: str, **given: Any) -> httpx.Response:
        try:
            answer = await self._http.post(path, **given)
        except httpx.HTTPError as error:
            raise SessionEnded("connection_lost", f"{self.url}: {error}") from error
        if answer.is_error:
            try:
                refusal = answer.json()["error"]
                code, message = str(refusal["code"]), str(refusal["message"])
            except (ValueError, KeyError, TypeError):
                code, message = str(answer.status_code), answer.reason_phrase
            raise SessionEnded(code, message)
        return answer

    def _link(
        self,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        opening: JsonObject | None = None,
        heartbeat: JsonObject | None = None,
        heartbeat_s: float = 60.0,
    ) -> ResumingLink:
        return ResumingLink(
            "ws" + self.url.removeprefix("http") + path,
            headers=self._headers,
            query=query or {},
            opening=opening,
            give_up_s=self._give_up_s,
            heartbeat=heartbeat,
            heartbeat_s=heartbeat_s,
            connect=partial(connect_in_process, self._app) if self._app else partial(connect_over_network, self._tls),
        )


def _given(**fields: Json) -> dict[str, Json]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}
