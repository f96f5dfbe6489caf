"""Admission by a certificate and by live headroom: bursts, kinds, and refusals before the upgrade."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets
from websockets.exceptions import InvalidStatus

from antiphon.admission.certificate import Certificate, CertifiedKind, Objective, encode
from antiphon.admission.headroom import MOST_YOUNG
from tests.cluster.callers import StockCaller
from tests.cluster.processes import Host
from tests.conftest import DATA
from tests.forking import run
from tests.scripted import speech
from tests.server.clients import b64

pytestmark = pytest.mark.server
N = {"captions": 3, "conversation": 4, "duplex": 2}


def certificate(folder: Path, mixed: float = 1.0, **sessions: int) -> Path:
    kinds = {kind: CertifiedKind(n, Objective(1.5, "a delay"), ()) for kind, n in sessions.items()}
    file = folder / "certificate.json"
    file.write_bytes(encode(Certificate(1, "2026-11-26T00:00:00Z", {}, ("m",), {}, kinds, mixed)))
    return file


def started(folder: Path, *flags: str, **env: str) -> Host:
    host = Host("host", ("tests.cluster.scripted_host",), flags, folder, {"ANTIPHON_HEADROOM": "true"} | env)
    host.start()
    host.wait()
    return host


@pytest.fixture
def certified(tmp_path: Path) -> Iterator[Host]:
    host = started(tmp_path, "--certificate", str(certificate(tmp_path, **N)))
    yield host
    host.kill()


class Callers:
    """The clients of a host. All of them leave at the end of the block."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._sockets: list[Any] = []

    async def __aenter__(self) -> Callers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(socket.close() for socket in self._sockets))

    async def knock(self, path: str, **headers: str) -> Any:
        """Return the socket if it was admitted, or the response that refused it."""
        try:
            socket = await websockets.connect(f"{self._host.ws}{path}", additional_headers=headers)
        except InvalidStatus as refused:
            return refused.response
        self._sockets.append(socket)
        return socket


def in_and_out(found: list[Any]) -> tuple[list[Any], list[Any]]:
    refused = [f for f in found if hasattr(f, "status_code")]
    return [f for f in found if f not in refused], refused


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("captions", "/v1/realtime?intent=transcription"),
        ("conversation", "/v1/realtime?model=gpt-realtime"),
        ("duplex", "/v1/duplex?model=echo"),
    ],
)
def test_a_burst_of_thrice_what_was_certified_is_refused_before_the_upgrade(
    certified: Host, kind: str, path: str
) -> None:
    async def act() -> None:
        async with Callers(certified) as callers:
            # A full-duplex client may resume its session, whose place is kept for a while.
            for _ in range(1 if kind == "duplex" else 2):
                found = await asyncio.gather(*(callers.knock(path) for _ in range(3 * N[kind])))
                inside, refused = in_and_out(found)
                if kind == "duplex":
                    # A full-duplex client gets a place when its session has begun.
                    await asyncio.sleep(0.5)
                    inside = [s for s in inside if s.close_code is None]
                assert len(inside) <= N[kind]
                for response in refused:
                    assert response.status_code == 503
                    assert int(response.headers["Retry-After"]) > 0
                    assert json.loads(response.body)["error"]["code"] == "rate_limit_exceeded"
                assert certified.metric(f'antiphon_held_sessions{{kind="{kind}"}}') == N[kind]
                assert certified.metric(f'antiphon_headroom_sessions{{kind="{kind}"}}') == 0
                assert certified.metric("antiphon_load ") == 1
                # Places are released.
                await asyncio.gather(*(s.close() for s in inside))
                if kind != "duplex":
                    await reached(lambda: not certified.metric("antiphon_load "))

    asyncio.run(act())


async def reached(true: Callable[[], object]) -> None:
    """Wait until a function returns something true."""
    async with asyncio.timeout(10):
        while True:
            if true():
                return
            await asyncio.sleep(0.05)


def test_kinds_share_the_machine_and_a_vllm_client_is_counted_as_captions(certified: Host) -> None:
    async def act() -> None:
        async with Callers(certified) as callers:
            talks = [await callers.knock("/v1/realtime?model=gpt-realtime") for _ in range(2)]
            undecided = await callers.knock("/v1/realtime")
            # Until its first message, the session counts as a conversation, so the load is 3 / 4. As a session of
            # captions, the load would be 1.08.
            assert (await callers.knock("/v1/realtime?intent=transcription")).status_code == 503
            await undecided.send(json.dumps({"type": "session.update", "model": "default"}))
            await reached(lambda: certified.metric('antiphon_held_sessions{kind="captions"}') == 1)
            # 2 / 4 and 1 / 3.
            assert (await callers.knock("/v1/realtime?model=gpt-realtime")).status_code == 503
            for socket in (*talks, undecided):
                await socket.close()

    asyncio.run(act())


def test_the_keys_own_limit_is_told_apart_from_a_full_server(tmp_path: Path) -> None:
    flags = ("--certificate", str(certificate(tmp_path, conversation=2)), "--sessions-per-key", "1")
    host = started(tmp_path, *flags, ANTIPHON_API_KEYS="one,two,three")

    async def act() -> None:
        async with Callers(host) as callers:
            path = "/v1/realtime?model=gpt-realtime"
            inside = [await callers.knock(path, Authorization=f"Bearer {key}") for key in ("one", "two")]
            assert all(s.close_code is None for s in inside)
            assert (await callers.knock(path, Authorization="Bearer one")).status_code == 429
            assert (await callers.knock(path, Authorization="Bearer three")).status_code == 503

    try:
        asyncio.run(act())
    finally:
        host.kill()


def test_a_file_over_http_takes_the_place_of_captions(certified: Host) -> None:
    async def act() -> None:
        async with Callers(certified) as callers:
            inside = [await callers.knock("/v1/realtime?intent=transcription") for _ in range(N["captions"])]
            file = {"file": ("speech.flac", (DATA / "audio" / "tau2-yes.flac").read_bytes())}
            async with httpx.AsyncClient(base_url=certified.url, trust_env=False) as client:
                refused = await client.post("/v1/audio/transcriptions", files=file, data={"model": "whisper-1"})
                assert refused.status_code == 503
                assert refused.headers["retry-after"]
                await inside[0].close()
                await reached(lambda: certified.metric('antiphon_held_sessions{kind="captions"}') < N["captions"])
                taken = await client.post("/v1/audio/transcriptions", files=file, data={"model": "whisper-1"})
                assert taken.status_code == 200, taken.text

    asyncio.run(act())


def test_without_a_certificate_a_burst_is_bounded_and_the_log_says_so(tmp_path: Path) -> None:
    host = started(tmp_path)

    async def act() -> None:
        async with Callers(host) as callers:
            found = await asyncio.gather(
                *(callers.knock("/v1/realtime?model=gpt-realtime") for _ in range(3 * MOST_YOUNG))
            )
            inside, refused = in_and_out(found)
            assert len(inside) == MOST_YOUNG
            assert {r.status_code for r in refused} == {503}

    try:
        asyncio.run(act())
        assert "no certificate: sessions are admitted by live headroom alone" in host.log
    finally:
        host.kill()


@pytest.mark.parametrize("attack", ["silent", pytest.param("first-frames", marks=pytest.mark.heavy), "json", "types"])
def test_whoever_is_in_goes_on_beside_a_hostile_neighbour(tmp_path: Path, attack: str) -> None:
    flags = ("--certificate", str(certificate(tmp_path, conversation=4)))
    host = started(tmp_path, *flags, ANTIPHON_API_KEYS="bystander,attacker")
    callers = [StockCaller(n, [host.ws], n, "bystander") for n in range(2)]
    loads, over = list[float](), asyncio.Event()

    async def talk(caller: StockCaller) -> None:
        async with caller.connected():
            await caller.converse(1)
            await attacking.wait()
            while not over.is_set():
                await caller.converse(2)
            caller.check()

    async def act() -> dict[str, Any]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.hostile", attack, host.url, "attacker", "--quick",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin
        assert process.stdout
        async with asyncio.timeout(90), asyncio.TaskGroup() as group:
            for caller in callers:
                group.create_task(talk(caller))
            assert await process.stdout.readline() == b"attacking\n"
            attacking.set()
            begun = [len(caller.said) for caller in callers]
            while any(len(c.said) < n + 6 for c, n in zip(callers, begun, strict=True)):
                loads.append(await asyncio.to_thread(host.metric, "antiphon_load "))
                await asyncio.sleep(0.1)
            process.stdin.close()
            over.set()
            found: dict[str, Any] = json.loads(await process.stdout.readline())
            await process.wait()
        return found

    attacking = asyncio.Event()
    try:
        found = asyncio.run(act())
        # The attacker was refused or answered, and took no place beyond its limit.
        assert found["tried"] > 0, found
        assert max(loads) <= 1.0
    finally:
        host.kill()


def test_a_server_whose_models_take_too_long_turns_red_and_takes_nobody_in(tmp_path: Path) -> None:
    """The scripted transcriber first decodes each turn at once. Then the test makes it wait."""
    host = started(tmp_path, "--certificate", str(certificate(tmp_path, captions=50)), ANTIPHON_TEST_FINAL_S="4")

    async def act() -> None:
        async with Callers(host) as callers:
            sockets = [await callers.knock("/v1/realtime?intent=transcription") for _ in range(8)]
            for socket in sockets:
                await socket.send(json.dumps({"type": "session.update", "session": MANUAL}))
            until = time.monotonic() + 30
            while not host.metric('antiphon_red{light="finals"}'):
                assert time.monotonic() < until, "it never turned red"
                for socket in sockets:
                    await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": SECOND}))
                    await socket.send(json.dumps({"type": "input_audio_buffer.commit"}))
                await asyncio.sleep(1)
            refused = await callers.knock("/v1/realtime?intent=transcription")
            assert refused.status_code == 503
            assert "no headroom now (finals)" in json.loads(refused.body)["error"]["message"]

    try:
        asyncio.run(act())
        assert "headroom: finals is red" in host.log
    finally:
        host.kill()


MANUAL = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}
SECOND = b64(speech(1, 3), 24_000)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ("{", "is not a certificate"),
        ('{"version": 1}', "is not a certificate"),
        ('{"version": 2, "date": "", "machine": {}, "models": [], "settings": {}, "kinds": {}}', "has version 2"),
        ('{"version": 1, "date": "", "machine": {}, "models": [], "settings": {}, "kinds": {}}', "certifies nothing"),
        (
            '{"version": 1, "date": "", "machine": {}, "models": [], "settings": {}, "kinds": {"dancing": '
            '{"sessions": 1, "objective": {"p95_s": 1, "delay": ""}, "curve": []}}}',
            "unknown kinds: dancing",
        ),
    ],
)
def test_a_file_that_is_no_certificate_stops_the_start_before_models_are_loaded(
    tmp_path: Path, text: str | None, says: str
) -> None:
    file = tmp_path / "certificate.json"
    if text is not None:
        file.write_text(text)
    done = run("antiphon", "serve", "--port", "0", "--no-pull", "--certificate", str(file))
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
