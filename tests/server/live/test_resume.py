"""Sessions that outlive their connection, over real sockets that are cut off at various moments."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from antiphon.audio import Pcm
from antiphon.audio.pcm import to_pcm16
from antiphon.cli.replay import compare
from antiphon.errors import Refused
from antiphon.recording.tape import Tape
from antiphon.recording.timeline import render
from antiphon.server.live import handshake
from antiphon.server.live.realtime import LiveRealtime
from antiphon.server.state import ServerState
from antiphon.settings import Settings
from antiphon.signals import become
from tests.scripted import FRAME, speech
from tests.server.scripted import Echo, serving, with_resume

LIMIT_S = 60
CHUNK = 1600


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[str, ServerState, Echo]]:
    with serving() as it:
        yield it


SOCKETS: list[ClientConnection] = []


async def dial(url: str) -> ClientConnection:
    """Return a socket that is closed at the end of the test."""
    SOCKETS.append(await connect(url, max_size=None))
    return SOCKETS[-1]


class Client:
    """A client that keeps its messages until the server has them, and resumes when it is cut off."""

    def __init__(self, url: str, query: str) -> None:
        self.url, self.query = url, query
        self.sent: list[str] = []
        self.seen: list[dict[str, Any]] = []
        self.last = 0
        self.cuts = 0
        self.session_id = self.token = ""
        self.socket: ClientConnection
        self.resumed: list[dict[str, Any]] = []

    async def open(self) -> None:
        self.socket = await dial(f"{self.url}{self.query}")

    def cut(self) -> None:
        """Reset the connection, without a close frame."""
        self.cuts += 1
        self.socket.transport.abort()

    async def come_back(self) -> dict[str, Any]:
        resume = "/v1/realtime?resume=" + self.session_id
        self.socket = await dial(f"{self.url}{resume}")
        await self.socket.send(json.dumps({
            "type": "session.resume", "session_id": self.session_id, "resume_token": self.token,
            "last_received_server_event_seq": self.last,
        }))  # fmt: skip
        event: dict[str, Any] = json.loads(await self.socket.recv())
        if event["type"] == "session.resumed":
            self.token = event["resume_token"]
            self.resumed.append(event)
        return event

    async def say(self, frame: str) -> None:
        self.sent.append(frame)
        await self.socket.send(frame)

    async def take(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(await self.socket.recv())
        if event["type"] == "session.created":
            self.session_id, self.token = event["session"]["id"], event["resume_token"]
        seq = event.get("server_event_seq")
        if seq is not None:
            assert seq > self.last, "an event came twice"
            self.last = seq
        self.seen.append(event)
        return event


def append(pcm: Pcm) -> str:
    return json.dumps({"type": "input_audio_buffer.append", "audio": b64encode(to_pcm16(pcm)).decode()})


def sound(turns: int) -> list[str]:
    pcm = np.concatenate([speech(1 + 3 * k, 3, 40) for k in range(turns)] + [np.zeros(FRAME * 40, np.float32)])
    return [append(pcm[at : at + CHUNK]) for at in range(0, len(pcm), CHUNK)]


def summary(seen: list[dict[str, Any]]) -> list[Any]:
    """Summarize a client's events, independent of how they were split: turns, transcripts and responses."""
    out: list[Any] = []
    for event in seen:
        match event["type"]:
            case "conversation.item.input_audio_transcription.completed" | "transcription.done":
                out.append(("heard", event.get("transcript", event.get("text"))))
            case "response.done":
                item = event["response"]["output"]
                out.append(("said", event["response"]["status"], item[0]["content"][0].get("text") if item else ""))
            case "input_audio_buffer.committed" | "response.created" | "error":
                out.append(event["type"])
    return out


PCM16 = {"type": "audio/pcm", "rate": 16000}
TRANSCRIPTION_INPUT = {"format": PCM16, "turn_detection": {"type": "server_vad", "silence_duration_ms": 500}}
TRANSCRIPTION = {
    "type": "session.update",
    "session": {"type": "transcription", "audio": {"input": TRANSCRIPTION_INPUT}},
}
CONVERSATION_INPUT = {"format": PCM16, "transcription": {"model": "default"}, "turn_detection": None}
CONVERSATION = {
    "type": "session.update",
    "session": {"type": "realtime", "output_modalities": ["text"], "audio": {"input": CONVERSATION_INPUT}},
}
SERVER_VAD = {"type": "server_vad"}
DUPLEX = {
    "type": "session.update",
    "session": {"modalities": ["text"], "turn_detection": SERVER_VAD, "extra_body": {"auto_response": False}},
}
AUDIO_SESSION = {"modalities": ["audio"], "turn_detection": SERVER_VAD}
COMMIT, CREATE = json.dumps({"type": "input_audio_buffer.commit"}), json.dumps({"type": "response.create"})


def script(kind: str, turns: int) -> tuple[str, list[str], dict[int, int]]:
    """Return the query, the client's frames, and for some frames (by index) the number of responses to await first."""
    if kind == "transcription":
        return "/v1/realtime?resume=1", [json.dumps(TRANSCRIPTION), *sound(turns)], {}
    frames, gates = [json.dumps(CONVERSATION if kind == "conversation" else DUPLEX)], {}
    for k in range(turns):
        pcm = speech(1 + 3 * k, 3)
        gates[len(frames)] = k
        frames += [append(pcm[at : at + CHUNK]) for at in range(0, len(pcm), CHUNK)] + [COMMIT, CREATE]
    return f"/v1/realtime?{'resume' if kind == 'conversation' else 'duplex'}=1", frames, gates


def done(kind: str, seen: list[dict[str, Any]]) -> int:
    last = "conversation.item.input_audio_transcription.completed" if kind == "transcription" else "response.done"
    return sum(e["type"] == last for e in seen)


async def hold(url: str, kind: str, turns: int, cuts: int, seed: int) -> Client:
    """Hold a session of `turns` turns and cut it off `cuts` times: while it sends, while it reads, or in between."""
    query, frames, gates = script(kind, turns)
    draw = random.Random(seed)
    client = Client(url, query)
    await client.open()
    if kind != "duplex":
        assert (await client.take())["type"] == "session.created"
    at = 0
    begun = kind != "duplex"
    # Maximum number of steps between two cuts.
    gap = max(1, (2 * len(frames)) // max(1, cuts))
    until = draw.randint(1, gap) if cuts else 10**9
    while done(kind, client.seen) < turns:
        may_send = at < len(frames) and done(kind, client.seen) >= max(g for i, g in {0: 0, **gates}.items() if i <= at)
        try:
            until -= 1
            if until <= 0 and begun and client.cuts < cuts:
                until = draw.randint(1, gap)
                if draw.random() < 0.5 and may_send:
                    # In the middle of sending.
                    await client.say(frames[at])
                    at += 1
                client.cut()
                raise ConnectionClosed(None, None)
            if may_send and draw.random() < 0.7:
                await client.say(frames[at])
                at += 1
                continue
            async with asyncio.timeout(0.02 if may_send else 10):
                event = await client.take()
            begun = begun or event["type"] == "session.created"
            if draw.random() < 0.3:
                await client.socket.send(json.dumps({"type": "session.event_ack", "server_event_seq": client.last}))
        except TimeoutError:
            assert may_send, f"nothing more came after {client.seen[-3:]}"
        except ConnectionClosed:
            resumed = await client.come_back()
            assert resumed["type"] == "session.resumed", resumed
            # Sends the frames again that the server has not received.
            at = resumed["received_events"]
            assert at <= len(client.sent)
            del client.sent[at:]
    client.cut()
    return client


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transcription", "conversation", "duplex"])
def test_when_a_session_is_cut_off_anywhere_then_its_client_gets_what_an_uncut_one_gets(
    scripted: tuple[str, ServerState, Echo], kind: str
) -> None:
    async def main() -> tuple[Client, Client]:
        whole = await hold(scripted[0], kind, 12, 0, 1)
        return whole, await hold(scripted[0], kind, 12, 70, 2)

    whole, torn = run(main())
    assert torn.cuts >= 60
    assert summary(torn.seen) == summary(whole.seen)
    words = [w for s in summary(whole.seen) if s[0] == "heard" for w in s[1].split()]
    assert words == [f"w{k}" for k in range(1, 37)]
    numbers = [e["server_event_seq"] for e in torn.seen if "server_event_seq" in e]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len({r["resume_token"] for r in torn.resumed}) == len(torn.resumed)


async def opened(url: str, query: str = "/v1/realtime?duplex=1", session: dict[str, Any] | None = None) -> Client:
    client = Client(url, query)
    await client.open()
    await client.say(json.dumps({"type": "session.update", "session": session or DUPLEX["session"]}))
    while not client.session_id:
        await client.take()
    return client


async def until(client: Client, kind: str) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while (event := await client.take())["type"] != kind:
            pass
    return event


async def turn(client: Client, first: int = 1) -> dict[str, Any]:
    """Speak a turn; return the `response.done` of its response."""
    await client.say(append(speech(first, 3)))
    await client.say(COMMIT)
    await client.say(CREATE)
    return await until(client, "response.done")


async def attempt(url: str, session_id: str, token: str, last: int = 0) -> dict[str, Any]:
    """Return the first frame after one session.resume."""
    async with connect(f"{url}/v1/realtime?duplex=1", max_size=None) as socket:
        await socket.send(json.dumps({
            "type": "session.resume", "session_id": session_id, "resume_token": token,
            "last_received_server_event_seq": last, "event_id": "event_1",
        }))  # fmt: skip
        return json.loads(await socket.recv())  # type: ignore[no-any-return]


def run(coroutine: Any) -> Any:
    async def main() -> Any:
        try:
            async with asyncio.timeout(LIMIT_S):
                return await coroutine
        finally:
            while SOCKETS:
                socket = SOCKETS.pop()
                socket.transport.abort()
                await socket.wait_closed()

    return asyncio.run(main())


def test_when_a_client_resumes_then_its_earlier_connection_is_replaced(scripted: tuple[str, ServerState, Echo]) -> None:
    async def main() -> None:
        client = await opened(scripted[0])
        first = client.socket
        await turn(client)
        resumed = await client.come_back()
        assert resumed["type"] == "session.resumed"
        assert resumed["received_events"] == len(client.sent)
        frames = [json.loads(f) async for f in first]
        assert frames[-1]["type"] == "session.replaced"
        assert first.close_code == 1000
        # The session continues with its history.
        await turn(client, 4)
        assert scripted[2].asked[-1] == ("w1 w2 w3", "w1 w2 w3", "w4 w5 w6")
        await client.socket.close()

    run(main())


def test_an_attempt_that_its_client_has_given_up_replaces_nobody(
    scripted: tuple[str, ServerState, Echo], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After it hung, the server reads two attempts. It reads the older attempt last, after its client has left."""
    monkeypatch.setattr(handshake, "GIVEN_UP_S", LIMIT_S)
    caplog.set_level(logging.INFO)

    async def main() -> None:
        url, state, _ = scripted
        client = await opened(url)
        await turn(client)
        used, attachment = client.token, state.sessions.resumable[client.session_id].attachment
        client.cut()
        await client.come_back()
        # The client has sent nothing over its new connection, so it may only have its earlier token.
        assert attachment.doubts(used)
        late = await dial(f"{url}/v1/realtime?duplex=1")
        about = {"session_id": client.session_id, "resume_token": used, "last_received_server_event_seq": 0}
        await late.send(json.dumps({"type": "session.resume", **about}))
        late.transport.abort()
        await become(lambda: any("was given up" in message for message in caplog.messages), 0.01)
        # The attempt does not invalidate the token of the attached client either.
        assert (await client.come_back())["type"] == "session.resumed"
        await turn(client, 4)
        assert not [event for event in client.seen if event["type"] == "session.replaced"]
        await client.socket.close()

    run(main())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in their order", "the older one last"])
def test_of_attempts_that_are_read_at_once_the_one_whose_client_is_there_has_the_session(
    scripted: tuple[str, ServerState, Echo], monkeypatch: pytest.MonkeyPatch, order: tuple[int, int]
) -> None:
    """After it was blocked, the server reads both attempts, and answers neither until the newer token is stored."""
    monkeypatch.setattr(handshake, "GIVEN_UP_S", LIMIT_S)
    resumed = LiveRealtime.resumed

    async def slowly(live: LiveRealtime, *given: Any) -> Any:
        await asyncio.sleep(0.2)
        return await resumed(live, *given)

    async def main() -> None:
        url, _, _ = scripted
        client = await opened(url)
        await turn(client)
        client.cut()
        monkeypatch.setattr(LiveRealtime, "resumed", slowly)
        sockets = [await dial(f"{url}/v1/realtime?resume={client.session_id}") for _ in range(2)]
        about = {"session_id": client.session_id, "resume_token": client.token}
        for at in order:
            request = {"type": "session.resume", **about, "last_received_server_event_seq": client.last}
            await sockets[at].send(json.dumps(request))
        # The client gave up the first attempt.
        sockets[0].transport.abort()
        client.socket = sockets[1]
        while (event := json.loads(await client.socket.recv()))["type"] != "session.resumed":
            assert event["type"] != "session.replaced", event
        client.token = event["resume_token"]
        await asyncio.sleep(0.5)
        await turn(client, 4)
        assert not [event for event in client.seen if event["type"] == "session.replaced"]
        await client.socket.close()

    run(main())


def test_an_attempt_with_the_token_of_before_is_served_if_its_client_stays(
    scripted: tuple[str, ServerState, Echo], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message with the newer token was lost with its connection, which the server still considers alive."""
    monkeypatch.setattr(handshake, "GIVEN_UP_S", 0.05)

    async def main() -> None:
        url, _, _ = scripted
        client = await opened(url)
        await turn(client)
        used = client.token
        await client.come_back()
        client.token = used
        assert (await client.come_back())["type"] == "session.resumed"
        await turn(client, 4)
        await client.socket.close()

    run(main())


def test_when_a_token_is_wrong_or_used_up_then_it_resumes_nothing(scripted: tuple[str, ServerState, Echo]) -> None:
    async def main() -> None:
        url = scripted[0]
        client = await opened(url)
        used = client.token
        client.cut()
        for session_id, token, code in (
            (client.session_id, "wrong", "invalid_resume_token"),
            (client.session_id, "", "invalid_resume_token"),
            ("sess-0", used, "unknown_session"),
        ):
            answer = await attempt(url, session_id, token)
            assert (answer["error"]["code"], answer["error"]["event_id"]) == (code, "event_1")
        assert (await attempt(url, client.session_id, used, 10**6))["error"]["code"] == "invalid_event_ack"
        await client.come_back()
        await turn(client)
        # The client has sent a message since, so the previous token is used up.
        client.cut()
        assert (await attempt(url, client.session_id, used))["error"]["code"] == "invalid_resume_token"
        assert (await client.come_back())["type"] == "session.resumed"
        await client.socket.close()

    run(main())


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({}, "bad_event"),
        ({"session_id": "a", "resume_token": 3}, "bad_event"),
        ({"session_id": "a", "resume_token": "b", "last_received_server_event_seq": -1}, "bad_event"),
    ],
)
def test_when_a_resume_is_malformed_then_it_is_refused_as_bad_event(
    scripted: tuple[str, ServerState, Echo], fields: dict[str, Any], code: str
) -> None:
    async def main() -> dict[str, Any]:
        async with connect(f"{scripted[0]}/v1/realtime?duplex=1") as socket:
            await socket.send(json.dumps({"type": "session.resume"} | fields))
            return json.loads(await socket.recv())  # type: ignore[no-any-return]

    assert run(main())["error"]["code"] == code


def test_when_a_session_is_open_then_a_resume_and_wrong_acknowledgements_are_refused(
    scripted: tuple[str, ServerState, Echo],
) -> None:
    async def main() -> list[str]:
        client = await opened(scripted[0])
        codes = []
        for frame in (
            {"type": "session.resume", "session_id": "a", "resume_token": "b"},
            {"type": "session.event_ack", "server_event_seq": 10**6},
            {"type": "session.event_ack"},
        ):
            await client.socket.send(json.dumps(frame))
            codes.append((await until(client, "error"))["error"]["code"])
        await client.say(json.dumps({"type": "session.close"}))
        await until(client, "session.closed")
        with pytest.raises(ConnectionClosed):
            await client.take()
        assert client.socket.close_code == 1000
        codes.append((await attempt(scripted[0], client.session_id, client.token))["error"]["code"])
        return codes

    assert run(main()) == ["session_resume_conflict", "invalid_event_ack", "invalid_event_ack", "unknown_session"]


def test_when_the_grace_period_is_over_then_the_session_is_unknown() -> None:
    async def main(url: str, state: ServerState) -> None:
        client = await opened(url)
        client.cut()
        for _ in range(500):
            await asyncio.sleep(0.02)
            if not state.sessions.live:
                break
        assert (await client.come_back())["error"]["code"] == "unknown_session"

    with serving(with_resume(grace_s=0.1)) as (url, state, _):
        run(main(url, state))


def test_when_the_journal_is_too_small_then_a_resume_names_the_gap_or_the_overflow() -> None:
    async def main(url: str, state: ServerState) -> tuple[str, str]:
        # The client reads the whole response, which is larger than the journal.
        client = await opened(url, session=AUDIO_SESSION)
        begun = client.last
        for _ in range(8):
            await client.say(json.dumps({"type": "push_text", "text": "word " * 20}))
            await until(client, "response.done")
        gap = await attempt(url, client.session_id, client.token, begun)
        # While the client is away, the journal overflows: the session ends, and a resume gets the reason.
        client = await opened(url, session=AUDIO_SESSION)
        await client.say(json.dumps({"type": "push_text", "text": "word " * 900}))
        # Waits until the response has begun, since the reset of a connection may overtake the frame before it.
        await until(client, "response.created")
        client.cut()
        for _ in range(6000):
            await asyncio.sleep(0.02)
            if state.sessions.overflowed.get("", client.session_id):
                break
        assert not state.sessions.resumable.get(client.session_id)
        overflow = await attempt(url, client.session_id, client.token, client.last)
        return gap["reason"], overflow["reason"]

    with serving(with_resume(journal_mb=1)) as (url, state, _):
        assert run(main(url, state)) == ("journal_gap", "journal_overflow")


@pytest.mark.parametrize("query", ["/v1/realtime?duplex=1", "/v1/realtime"])
def test_when_the_model_has_no_room_for_a_session_then_its_client_is_told_to_come_back(
    scripted: tuple[str, ServerState, Echo], monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    async def refuse(owner: object = None) -> Echo:
        raise Refused("no room for another conversation", 2.0)

    async def main() -> None:
        async with connect(f"{scripted[0]}{query}") as socket:
            await socket.send(json.dumps({"type": "session.update", "session": {"type": "realtime"}}))
            codes: list[str] = []
            with pytest.raises(ConnectionClosed):
                while True:
                    codes.append(json.loads(await socket.recv()).get("error", {}).get("code"))
            assert "resource_exhausted" in codes
            assert (socket.close_code, socket.close_reason) == (1013, "resource_exhausted")

    monkeypatch.setattr(scripted[2], "open", refuse)
    run(main())


def test_when_a_session_fails_then_it_ends_alone(
    scripted: tuple[str, ServerState, Echo], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        other, one = await opened(scripted[0]), await opened(scripted[0])
        await one.say(json.dumps({"type": "push_text", "text": "fail"}))
        await one.say(CREATE)
        failed = await until(one, "response.done")
        assert failed["response"]["status"] == "failed"
        # The next turn works; an exception that no contract allows ends the session with `server_error`.
        await turn(one)
        await one.say(json.dumps({"type": "push_text", "text": "crash"}))
        await one.say(CREATE)
        assert (await until(one, "error"))["error"]["code"] == "server_error"
        await until(one, "session.closed")
        done = await turn(other)
        assert done["response"]["status"] == "completed"
        await other.socket.close()

    run(main())


def test_when_no_token_was_asked_for_then_the_session_cannot_be_resumed(
    scripted: tuple[str, ServerState, Echo],
) -> None:
    async def main() -> dict[str, Any]:
        async with connect(f"{scripted[0]}/v1/realtime") as socket:
            created = json.loads(await socket.recv())
        assert "resume_token" not in created
        return await attempt(scripted[0], created["session"]["id"], "x")

    assert run(main())["error"]["code"] == "unknown_session"


LONG = json.dumps({"type": "push_text", "text": "word " * 900})


@pytest.mark.slow
def test_when_a_client_does_not_read_then_a_resume_still_replaces_it(scripted: tuple[str, ServerState, Echo]) -> None:
    async def main() -> None:
        client = await opened(scripted[0], session=AUDIO_SESSION)
        attachment = scripted[1].sessions.resumable[client.session_id].attachment
        await client.say(LONG)
        for _ in range(500):
            await asyncio.sleep(0.01)
            if attachment.outbox.num_waiting > 256:
                break
        assert attachment.outbox.num_waiting > 256
        # The server's reader waits for room too, while it handles a frame.
        await client.say(json.dumps({"type": "session.heartbeat"}))
        for _ in range(500):
            await asyncio.sleep(0.01)
            if attachment.num_received == len(client.sent):
                break
        assert (await client.come_back())["type"] == "session.resumed"
        assert client.resumed[0]["received_events"] <= len(client.sent)
        await until(client, "response.done")

    run(main())


def test_when_a_resume_is_refused_then_the_attached_client_stays(scripted: tuple[str, ServerState, Echo]) -> None:
    async def main() -> None:
        client = await opened(scripted[0])
        await turn(client)
        answer = await attempt(scripted[0], client.session_id, client.token, 10**6)
        assert answer["error"]["code"] == "invalid_event_ack"
        assert (await turn(client, 4))["response"]["status"] == "completed"

    run(main())


def test_when_several_clients_resume_at_once_then_each_is_answered(scripted: tuple[str, ServerState, Echo]) -> None:
    async def main() -> None:
        client = await opened(scripted[0])
        resume = json.dumps({"type": "session.resume", "session_id": client.session_id, "resume_token": client.token})
        sockets = [await dial(f"{scripted[0]}/v1/realtime?duplex=1") for _ in range(4)]
        await asyncio.gather(*(s.send(resume) for s in sockets))
        firsts = [json.loads(f) for f in await asyncio.gather(*(s.recv() for s in sockets))]
        # Each attempt is answered: it resumes, and all but one are then replaced, or it is too late for its token.
        assert {f["type"] for f in firsts} <= {"session.resumed", "error"}
        assert "session.resumed" in {f["type"] for f in firsts}

    run(main())


@pytest.mark.slow
def test_when_wrong_acknowledgements_flood_in_then_their_errors_stay_bounded(
    scripted: tuple[str, ServerState, Echo],
) -> None:
    async def main() -> None:
        client = await opened(scripted[0])
        outbox = scripted[1].sessions.resumable[client.session_id].attachment.outbox
        wrong = json.dumps({"type": "session.event_ack", "server_event_seq": 10**6})
        try:
            async with asyncio.timeout(1.5):
                while True:
                    await client.socket.send(wrong)
        except TimeoutError:
            assert outbox.num_waiting <= 300

    run(main())


def test_when_a_recorded_session_is_resumed_then_its_recording_says_so(tmp_path: Path) -> None:
    settings = Settings()
    with serving(replace(settings, server=replace(settings.server, record=str(tmp_path)))) as (url, _, _):

        async def main() -> None:
            client = await opened(url)
            await turn(client)
            await client.come_back()
            await turn(client, 4)
            await client.socket.close()

        run(main())
    (folder,) = tmp_path.iterdir()
    outputs = Tape.read(folder).outputs()
    reported = [event.type for event in outputs if event.type in ("session.replaced", "session.resumed")]
    assert reported == ["session.replaced", "session.resumed"]
    assert "connection resumed" in render(Tape.read(folder))
    # A replay is never cut off, and does not need these events.
    assert compare(outputs, [event for event in outputs if event.type not in reported]) == 0
