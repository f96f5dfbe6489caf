"""What a URL turns out to be: each kind of transcriber's server, and what is said about any other server."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from antiphon.errors import ModelError, RemoteError
from antiphon.remote.transcriber.rest import RestServer
from antiphon.remote.transcriber.sockets import OpenAiWire, StreamingServer
from antiphon.remote.transcriber.transcriber import RemoteTranscriber
from antiphon.remote.transcriber.wyoming import WyomingServer
from tests.contracts.transcribers import ScriptedWyoming, remote
from tests.remote.transcriber.faults import on_a_port
from tests.server.scripted import serving

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
MODELS = b'{"object": "list", "data": [{"id": "parakeet", "owned_by": "lab"}, {"id": "canary"}]}'


def http_server(answers: dict[str, tuple[str, bytes]]) -> Serve:
    """Return a server that answers a request line's method and path, and 404 to all others."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            method, path = head.decode().split(" ")[:2]
            status, body = answers.get(f"{method} {path.partition('?')[0]}", ("404 Not Found", b"{}"))
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
            )
            await writer.drain()
        finally:
            writer.close()

    return serve


def found(serve: Serve, path: str = "/v1", model: str = "parakeet", scheme: str = "http") -> RemoteTranscriber:
    with on_a_port(serve) as port:
        return remote(f"{scheme}://127.0.0.1:{port}{path}", model=model)


def test_another_antiphon_streams_and_reports_its_languages() -> None:
    with serving() as (url, _, _):
        transcriber = remote(url.replace("ws", "http") + "/v1")
        (endpoint,) = transcriber.pool.all
        assert isinstance(endpoint.server, StreamingServer)
        assert isinstance(endpoint.server.wire, OpenAiWire)
        assert endpoint.is_antiphon
        assert "en" in transcriber.profile.languages
        assert (transcriber.profile.id, transcriber.profile.rollback_tokens) == ("default", 0)
        ((_, what, works),) = asyncio.run(transcriber.pool.report())
        assert (what, works) == ("another antiphon, default, word times and probabilities", True)


@pytest.mark.parametrize("path", ["/v1", "/v1/audio/transcriptions"])
def test_a_server_that_takes_files_only_gets_windows(path: str) -> None:
    files = {"POST /v1/audio/transcriptions": ("422 Unprocessable", b"{}"), "GET /v1/models": ("200 OK", MODELS)}
    transcriber = found(http_server(files), path)
    assert isinstance(transcriber.pool.all[0].server, RestServer)
    assert transcriber.profile.agreement_s > 0
    assert transcriber.profile.translates


def test_a_server_without_a_list_of_models_is_taken_at_its_word() -> None:
    transcriber = found(http_server({"POST /v1/audio/transcriptions": ("400 Bad", b"{}")}), model="anything")
    assert isinstance(transcriber.pool.all[0].server, RestServer)


def test_a_wyoming_server_reports_its_models() -> None:
    transcriber = found(ScriptedWyoming("tiny").serve, "", "tiny", "tcp")
    assert isinstance(transcriber.pool.all[0].server, WyomingServer)
    assert transcriber.profile.languages == ("en",)
    with pytest.raises(ModelError, match="has no model large; it has tiny"):
        found(ScriptedWyoming("tiny").serve, "", "large", "tcp")


def test_a_model_that_is_not_there_is_told_which_ones_are() -> None:
    with pytest.raises(ModelError, match="has no model whisper; it has canary, parakeet"):
        found(http_server({"GET /v1/models": ("200 OK", MODELS)}), model="whisper")


@pytest.mark.parametrize(
    ("answers", "what"),
    [
        ({"POST /v1/chat/completions": ("400 Bad", b"{}")}, "is a language model's server"),
        ({"POST /v1/audio/speech": ("422 Bad", b"{}")}, "is a voice's server"),
        ({}, "is a server without /audio/transcriptions and /realtime"),
    ],
)
def test_a_server_of_another_kind_is_told_what_it_is(answers: dict[str, tuple[str, bytes]], what: str) -> None:
    with pytest.raises(ModelError, match=what):
        found(http_server(answers))


def test_a_wyoming_server_of_voices_is_no_transcriber() -> None:
    info = b'{"asr": [], "tts": [{"name": "piper", "voices": [{"name": "amy", "languages": ["en"]}]}]}'

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b'{"type": "info", "data_length": %d}\n%s' % (len(info), info))
        await writer.drain()
        writer.close()

    with pytest.raises(ModelError, match=r"is a Wyoming server of voices \(amy\), and no transcriber"):
        found(serve, "", "m", "tcp")


def test_a_web_server_behind_tcp_is_no_wyoming_server() -> None:
    with pytest.raises(ModelError, match="does not speak the Wyoming protocol"):
        found(answers_with(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "", "m", "tcp")


def answers_with(data: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(data)
        await writer.drain()
        writer.close()

    return serve


def test_a_wrong_key_is_told_by_its_variable() -> None:
    with pytest.raises(ModelError, match=r"does not accept the key \(ANTIPHON_TRANSCRIBER_KEY"):
        found(http_server({"GET /v1/models": ("401 Unauthorized", b"{}")}))


def test_a_redirect_is_told_at_the_start() -> None:
    with pytest.raises(ModelError, match="redirects to another address, which is not followed"):
        found(http_server({"GET /v1/models": ("302 Found", b"")}))


def test_a_server_that_is_away_may_say_its_kind_by_its_url() -> None:
    with on_a_port(http_server({})) as port:
        pass
    with pytest.raises(RemoteError, match="start it first"):
        remote(f"http://127.0.0.1:{port}/v1", model="m")
    for url in (f"http://127.0.0.1:{port}/v1/audio/transcriptions", f"tcp://127.0.0.1:{port}"):
        transcriber = remote(url, model="m")
        assert transcriber.pool.is_away
        assert transcriber.pool.all[0].server


def test_a_certificate_that_is_not_trusted_is_told(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*self_signed(tmp_path))

    async def main() -> str:
        server = await asyncio.start_server(http_server({}), "127.0.0.1", 0, ssl=context)
        async with server:
            port = server.sockets[0].getsockname()[1]
            loop = asyncio.get_running_loop()
            url = f"https://127.0.0.1:{port}/v1"
            with pytest.raises(RemoteError) as error:
                await loop.run_in_executor(None, lambda: remote(url, model="m"))
            return str(error.value)

    assert "CERTIFICATE_VERIFY_FAILED" in asyncio.run(main())


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 that no authority has signed, and its key."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    certificate = builder.sign(key, hashes.SHA256())
    files = folder / "cert.pem", folder / "key.pem"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    files[1].write_bytes(pem)
    return files
