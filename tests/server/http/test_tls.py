"""TLS: certificates that can and cannot be used, their reload, handshakes that do not end, and clients that trust."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import ssl
import stat
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import httpx
import pytest

from antiphon.cli.main import main as command_line
from antiphon.client import Client, ClientConversation, ConversationEvent, ResponseEnds, SessionEnded, pinned
from antiphon.client.network import trusting
from antiphon.errors import RemoteError, SettingsError
from antiphon.server.http.listening import QuietServer, bind
from antiphon.server.http.tls import (
    FOR_CLIENTS,
    RENEWED_DAYS,
    VALID_DAYS,
    ServerTls,
    open_tls,
    own_names,
    read_certificate,
    self_signed,
)
from antiphon.server.metrics import Metrics
from antiphon.server.run import http_server
from antiphon.server.state import ServerState
from antiphon.settings import ServerSettings, Settings, load
from tests.cluster.processes import SCRIPTED, cluster
from tests.conftest import DATA
from tests.forking import ForkedProcess, forker
from tests.server.test_silent_clients import run

NOW = datetime.now(UTC)
NAMES = ("localhost", "127.0.0.1")
RECORDING = str(DATA / "audio" / "tau2-yes.flac")
BEGIN = b"-----BEGIN CERTIFICATE-----"


def pair(folder: Path, days_ago: float = 0) -> tuple[Path, Path]:
    """Write a certificate that was made some days ago, and its key, and return their files."""
    both = self_signed(folder / "made", NAMES, NOW - timedelta(days=days_ago)).read_bytes()
    cert, key = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(both[both.index(BEGIN) :])
    key.write_bytes(both[: both.index(BEGIN)])
    return cert, key


def opened(cert: Path | str, key: Path | str, **options: str | bool) -> ServerTls | None:
    return open_tls(load({"tls_cert": str(cert), "tls_key": str(key), **options}))


@asynccontextmanager
async def host(tls: ServerTls, **settings: str) -> AsyncIterator[tuple[str, QuietServer]]:
    """Yield the URL of a server without models that has this certificate, and the server."""
    state = ServerState(load(settings | {"port": "0"}), Metrics())
    with bind("127.0.0.1", 0) as sock:
        server = http_server(state, tls)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        await server.listens.wait()
        try:
            yield f"https://127.0.0.1:{sock.getsockname()[1]}", server
        finally:
            server.should_exit = True
            await serving


# --- self-signed ------------------------------------------------------------------------------------------------------


def test_a_self_signed_certificate_is_kept_and_made_again_when_it_would_not_serve(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    file = self_signed(folder, [*NAMES, "fd00::7"], NOW)
    first = file.read_bytes()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, file)] == [0o700, 0o600]
    found = read_certificate(file, file)
    assert found.names == {*NAMES, "fd00::7"}
    # The copy for clients has no key.
    assert BEGIN in first
    assert (folder / FOR_CLIENTS).read_bytes() == first[first.index(BEGIN) :]

    def kept(names: tuple[str, ...], days: float) -> bool:
        before = file.read_bytes()
        return self_signed(folder, names, NOW + timedelta(days=days)).read_bytes() == before

    assert kept(NAMES, 0)
    # Addresses of IPv6 change every day.
    assert kept((*NAMES, "fd00::8"), 1)
    assert kept(NAMES, VALID_DAYS - RENEWED_DAYS - 1)
    assert not kept((*NAMES, "192.0.2.7"), 0)
    assert not kept((*NAMES, "192.0.2.7", "voice.home"), 0)
    assert not kept(NAMES, VALID_DAYS - RENEWED_DAYS + 1)
    file.write_bytes(b"damaged")
    assert not kept(NAMES, 0)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_self_signed_certificate_names_this_machine_and_what_the_settings_name() -> None:
    names = own_names(replace(ServerSettings(), host="0.0.0.0", allowed_hosts=("*", "Voice.home")))
    assert {"localhost", "127.0.0.1", "voice.home"} <= set(names)
    assert "*" not in names
    assert "0.0.0.0" not in names
    assert not any(name.startswith("fe80") for name in names)


# --- certificates that cannot be used ---------------------------------------------------------------------------------


def without_key(cert: Path, key: Path) -> None:
    key.unlink()


def of_another(cert: Path, key: Path) -> None:
    key.write_bytes(pair(key.parent / "other")[1].read_bytes())


def not_a_certificate(cert: Path, key: Path) -> None:
    cert.write_bytes(b"hello")


def a_key_for_a_certificate(cert: Path, key: Path) -> None:
    cert.write_bytes(key.read_bytes())


def a_certificate_for_a_key(cert: Path, key: Path) -> None:
    key.write_bytes(cert.read_bytes())


def encrypted(cert: Path, key: Path) -> None:
    command = ["openssl", "ec", "-in", key, "-aes256", "-passout", "pass:secret", "-out", key.with_suffix(".new")]
    subprocess.run(command, check=True, capture_output=True)
    key.with_suffix(".new").replace(key)


def a_folder(cert: Path, key: Path) -> None:
    cert.unlink()
    cert.mkdir()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (without_key, "--tls-key .*key.pem: No such file"),
        (of_another, "--tls-key .*key.pem: it is not the key of the certificate .*cert.pem"),
        (not_a_certificate, "--tls-cert .*cert.pem: there is no certificate in PEM form"),
        (a_key_for_a_certificate, "--tls-cert .*cert.pem: there is no certificate in PEM form"),
        (a_certificate_for_a_key, "--tls-key .*key.pem: there is no private key in PEM form"),
        (encrypted, "--tls-key .*key.pem: the key is encrypted"),
        (a_folder, "--tls-cert .*cert.pem: Is a directory"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_named(
    spoil: Callable[[Path, Path], None], says: str, tmp_path: Path
) -> None:
    cert, key = pair(tmp_path)
    assert opened(cert, key)
    spoil(cert, key)
    with pytest.raises(SettingsError, match=says):
        opened(cert, key)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tls_cert": "cert.pem"}, "--tls-cert needs --tls-key"),
        ({"tls_key": "key.pem"}, "--tls-key needs --tls-cert"),
        ({"tls": "self-signed", "tls_cert": "cert.pem", "tls_key": "key.pem"}, "either --tls self-signed, or"),
        ({"tls": "on"}, "'on' is not one of off, self-signed"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        open_tls(load(given))
    assert open_tls(Settings()) is None


@pytest.mark.parametrize(
    ("days_ago", "says"), [(VALID_DAYS + 1, "the certificate expired on 20"), (-2, "is not valid before 20")]
)
def test_an_expired_certificate_is_served_only_if_a_setting_allows_it(
    days_ago: int, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = pair(tmp_path, days_ago)
    with pytest.raises(SettingsError, match=f"{says}.*--tls-allow-expired"):
        opened(cert, key)
    assert not caplog.messages
    tls = opened(cert, key, tls_allow_expired=True)
    assert tls
    assert re.search(says, caplog.text)

    async def main() -> None:
        async with host(tls) as (url, _), Client(url, ca=cert) as client:
            with pytest.raises(SessionEnded, match=r"certificate has expired|certificate is not yet valid"):
                await client.speak("Hello.")

    asyncio.run(main())


# --- changes ----------------------------------------------------------------------------------------------------------


def test_changed_files_are_served_to_new_connections_and_a_half_changed_pair_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "antiphon.server.http.tls")
    cert, key = pair(tmp_path)
    tls = opened(cert, key)
    assert tls
    old, old_cert = tls.current.fingerprint, cert.read_bytes()
    new_cert, new_key = (path.read_bytes() for path in pair(tmp_path / "new"))

    async def main() -> None:
        async with host(tls) as (url, _), httpx.AsyncClient(verify=trusting(cert), trust_env=False) as before:
            assert (await before.get(f"{url}/health")).status_code == 200
            assert not tls.reload()
            cert.write_bytes(new_cert)
            # The key is still the old one.
            assert [tls.reload(), tls.reload()] == [False, False]
            assert tls.current.fingerprint == old
            key.write_bytes(new_key)
            assert tls.reload()
            assert tls.current.fingerprint != old
            async with httpx.AsyncClient(verify=trusting(cert), trust_env=False) as after:
                assert (await after.get(f"{url}/health")).status_code == 200
            # A connection that is open goes on, while a new one with the old trust fails.
            assert (await before.get(f"{url}/health")).status_code == 200
            (tmp_path / "old.pem").write_bytes(old_cert)
            async with Client(url, ca=tmp_path / "old.pem") as client:
                with pytest.raises(SessionEnded, match="CERTIFICATE_VERIFY_FAILED"):
                    await client.speak("Hello.")

    asyncio.run(main())
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "the certificate stays as it was: --tls-key" in errors[0]


def test_a_certificate_that_expires_while_it_is_served_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return NOW + timedelta(days=VALID_DAYS + 1)

    tls = opened(*pair(tmp_path))
    assert tls
    monkeypatch.setattr("antiphon.server.http.tls.datetime", Later)
    assert [tls.reload(), tls.reload()] == [False, False]
    (message,) = caplog.messages
    assert "the certificate expired on" in message


# --- handshakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_connection_without_a_handshake_holds_a_place_and_ends(data: bytes, tmp_path: Path) -> None:
    tls = opened(*pair(tmp_path))
    assert tls

    async def main() -> None:
        async with host(tls, head_timeout_s="7") as (url, server):
            began_s = asyncio.get_running_loop().time()
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(data)
            while not server.connections.num_open:  # noqa: ASYNC110
                await asyncio.sleep(0)
            # An alert of TLS may come before the end.
            await reader.read()
            took_s = asyncio.get_running_loop().time() - began_s
            assert took_s < 1 if data.startswith(b"GET") else 6.9 < took_s < 10
            with anyio.fail_after(5):
                while server.connections.num_open:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            writer.close()

    run(main)


def test_when_silent_connections_hold_all_places_then_further_ones_end_before_a_handshake(tmp_path: Path) -> None:
    tls = opened(*pair(tmp_path))
    assert tls

    async def main() -> None:
        async with host(tls, connections_per_address="3") as (url, server):
            port = int(url.rpartition(":")[2])
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            assert await silent[3][0].read() == b""
            assert server.connections.num_open == 3
            silent[0][1].close()
            async with httpx.AsyncClient(verify=trusting(tls.cert), trust_env=False) as client:
                while server.connections.num_open == 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                assert (await client.get(f"{url}/health")).status_code == 200
            for _, writer in silent:
                writer.close()

    asyncio.run(main())


# --- a process, and clients that trust it -----------------------------------------------------------------------------


@asynccontextmanager
async def process(home: Path, *flags: str) -> AsyncIterator[tuple[str, str, ForkedProcess]]:
    """Yield the URL, the printed fingerprint and the process of `antiphon serve --tls self-signed`."""
    arguments = [*SCRIPTED, "--host", "0.0.0.0", "--allow-anonymous", "--port", "0", "--tls", "self-signed", *flags]
    with (home / "log").open("w") as log:
        popen = forker().start([*arguments, "--home", str(home)], log, dict(os.environ))
    try:
        said = ""
        while "curl " not in said:
            line = popen.stdout.readline()
            assert line, (home / "log").read_text()
            said += line
        found = re.search(r"ready at (https://\S+)\s+certificate: SHA-256 (\S+),", said)
        assert found
        assert re.search(r"addresses:   .*https://127\.0\.0\.1:\d+", said)
        assert f"--cacert {home}/tls/{FOR_CLIENTS}" in said
        yield found[1].replace("0.0.0.0", "localhost"), found[2], popen
    finally:
        popen.send_signal(signal.SIGTERM)
        with popen:
            popen.wait(20)


async def until_answered(talk: ClientConversation) -> AsyncIterator[ConversationEvent]:
    async for event in talk:
        yield event
        if isinstance(event, ResponseEnds):
            return


@pytest.mark.server
def test_clients_trust_a_self_signed_server_by_its_file_or_its_fingerprint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        async with process(tmp_path) as (url, fingerprint, _):
            ca = tmp_path / "tls" / FOR_CLIENTS
            for trust in (ca, await asyncio.to_thread(pinned, url, fingerprint)):
                async with Client(url, ca=trust) as client, client.conversation() as talk:
                    await talk.send_text("one two")
                    said = [event.text async for event in until_answered(talk) if isinstance(event, ResponseEnds)]
                    assert said == ["one two"]
            async with Client(url) as client:
                with pytest.raises(SessionEnded, match="CERTIFICATE_VERIFY_FAILED"):
                    async with client.conversation() as talk:
                        await anext(until_answered(talk))
            with pytest.raises(RemoteError, match="another certificate"):
                await asyncio.to_thread(pinned, url, "00:11")
            port = url.rpartition(":")[2]
            # The names in the certificate do not matter to a fingerprint.
            other = await asyncio.to_thread(pinned, f"https://127.0.0.2:{port}", fingerprint)
            async with httpx.AsyncClient(verify=other, trust_env=False) as client:
                answer = await client.get(f"https://127.0.0.2:{port}/")
                assert answer.status_code == 200
            untrusted = "its certificate is not trusted: --ca FILE"
            for command, options, code, says in (
                ("top", ("--ca", str(ca)), 0, url),
                ("top", ("--fingerprint", fingerprint), 0, url),
                ("top", (), 1, untrusted),
                ("top", ("--fingerprint", "ab"), 1, "another certificate"),
                ("top", ("--ca", "/missing.pem"), 2, "--ca: /missing.pem: No such file"),
                ("talk", (), 1, untrusted),
                ("talk", ("--fingerprint", "ab"), 1, "another certificate"),
            ):
                given = [url, "--once"] if command == "top" else ["--url", url, "--hear", RECORDING]
                assert await asyncio.to_thread(command_line, [command, *given, *options]) == code, options
                shown = capsys.readouterr()
                assert says in shown.out + shown.err

    asyncio.run(main())


@pytest.mark.server
def test_a_door_serves_https_before_hosts_without_it(tmp_path: Path) -> None:
    async def main(url: str) -> None:
        async with Client(url, ca=tmp_path / "tls" / FOR_CLIENTS) as client, client.conversation() as talk:
            await talk.send_text("one two")
            said = [event.text async for event in until_answered(talk) if isinstance(event, ResponseEnds)]
            assert said == ["one two"]

    with cluster("", num_hosts=1) as found:
        door = found.add_door("--behind", found.hosts[0].url, "--tls", "self-signed", "--home", str(tmp_path))
        door.wait()
        asyncio.run(main(f"https://localhost:{door.port}"))


@pytest.mark.server
def test_a_running_server_shows_a_replaced_certificate_by_itself(tmp_path: Path) -> None:
    async def main() -> None:
        async with process(tmp_path) as (url, fingerprint, _):
            (tmp_path / "tls" / "self-signed.pem").unlink()
            file = self_signed(tmp_path / "tls", ["localhost"], NOW)
            new = read_certificate(file, file).fingerprint
            assert new != fingerprint
            address = ("localhost", int(url.rpartition(":")[2]))
            with anyio.fail_after(30):
                while True:
                    shown = await asyncio.to_thread(ssl.get_server_certificate, address)
                    if shown == (tmp_path / "tls" / FOR_CLIENTS).read_text():
                        break
                    await asyncio.sleep(0.1)

    asyncio.run(main())
