"""Models on other servers: the delay that they add, the words that a killed server costs, and what a front holds.

    antiphon bench remote [--sections finals,killed,front] [--turns 40] [--conversations 100]

The servers are processes on this machine.

- finals: the time from the end of a turn to its transcript, with the scripted transcriber in the front, and with the
  same transcriber in another antiphon, over a WebSocket and over REST. It answers at once, so the difference is what
  the way to it adds; over REST, also the server's own time for a file. In `vad`, a silence of 0.3 s ends the turn; in
  `commit`, the client does.
- killed: two servers. In the middle of each turn, the one that hears it is killed (SIGKILL). Counts the words of the
  transcripts that are missing or wrong.
- front: a server with no model but the detector of speech (Silero's), with a transcriber and a language model on a
  scripted server that answers at once. The callers say a recorded sentence every ten seconds. Measures the front's CPU
  time of each conversation, and the time from the end of a turn to the first word of its answer.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from bench.common import beside, measured, options, show, spread, together
from bench.driver import Session, on_wire
from tests.cluster.processes import Host
from tests.scripted import FRAME, speech, text

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.containers import decode_all
from antiphon.audio.wav import wav_header
from antiphon.client.link import SessionEnded

ROOT = Path(__file__).resolve().parents[1]
SCRIPTED, PATH = ("tests.cluster.scripted_host",), "/v1/realtime?intent=transcription"
ITEM = "conversation.item.input_audio_transcription"
COMPLETED, FAILED = f"{ITEM}.completed", f"{ITEM}.failed"
FLAGS = ("--sessions-per-key", "1000", "--max-sessions", "1000", "--no-headroom", "--log-level", "warning")
# The turns of each way in `finals`, the words of a turn, and the seconds of audio that are sent at once.
NUM_FINALS, NUM_WORDS, CHUNK_S = 30, 8, 0.05
# The word of a turn in the middle of which a server is killed.
KILLED_AT = 4
# Seconds from the beginning of one sentence of a caller to the next, and the sentences that each says.
SENTENCE_S, NUM_SENTENCES = 10.0, 4
# Seconds for which an idle front is measured.
IDLE_S = 10.0
RECORDING = ROOT / "tests" / "data" / "audio" / "barista-19d5be84.flac"


@contextmanager
def host(
    name: str, folder: Path, transcriber: str = "", *flags: str, module: tuple[str, ...] = SCRIPTED
) -> Iterator[Host]:
    """Run a server. `transcriber`: `URL#MODEL` for a scripted one."""
    env = {"ANTIPHON_TEST_TRANSCRIBER": transcriber, "OMP_NUM_THREADS": "1"}
    found = Host(name, module, (*FLAGS, *flags), folder, env)
    found.start()
    try:
        found.wait()
        yield found
    finally:
        found.send(signal.SIGTERM)
        found.end()


def configured(vad: bool) -> dict[str, Any]:
    """Return the configuration of a transcription session."""
    turns = {"type": "server_vad", "silence_duration_ms": 300} if vad else None
    audio = {"format": {"type": "audio/pcm", "rate": SAMPLE_RATE_HZ}, "turn_detection": turns}
    return {"session": {"type": "transcription", "audio": {"input": audio}}}


async def speak(session: Session, pcm: Pcm, since_s: float) -> None:
    """Send audio in real time, as if its recording had begun at `since_s`."""
    size = int(CHUNK_S * SAMPLE_RATE_HZ)
    for at in range(0, len(pcm), size):
        await asyncio.sleep(max(0.0, since_s + (at + size) / SAMPLE_RATE_HZ - time.monotonic()))
        await session.append(on_pcm(pcm[at : at + size]))


def on_pcm(pcm: Pcm) -> bytes:
    return np.round(pcm * 32768).astype("<i2").tobytes()


# --- finals -----------------------------------------------------------------------------------------------------------


async def delays(url: str, vad: bool, turns: int) -> list[float]:
    """Return the seconds from the end of each turn to its transcript."""
    found, silence = list[float](), np.zeros(25 * FRAME, np.float32)
    async with Session(url, PATH, configured(vad)) as session:
        for number in range(turns):
            since = len(session.events)
            pcm = speech(1 + NUM_WORDS * number % 400, NUM_WORDS)
            await speak(session, np.concatenate((pcm, silence)) if vad else pcm, time.monotonic())
            if not vad:
                ended_s = time.monotonic()
                await session.send("input_audio_buffer.commit")
            at_s, event = await session.first((COMPLETED, FAILED), since)
            assert event.get("transcript") == text(1 + NUM_WORDS * number % 400, NUM_WORDS), event
            if vad:
                ended_s = await session.until("input_audio_buffer.speech_stopped", since)
            found.append(at_s - ended_s)
    return found


def finals() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        back = stack.enter_context(host("back", folder))
        base = f"{back.url}/v1"
        ways = {
            "in the front": "",
            "another antiphon": f"{base}#default",
            "over REST": f"{base}/audio/transcriptions#default",
        }
        fronts = {way: stack.enter_context(host(f"front{k}", folder, at)) for k, (way, at) in enumerate(ways.items())}
        rows = dict[str, dict[str, Any]]()
        for mode, vad in (("vad", True), ("commit", False)):
            # The ways take turns at the same time, so that the machine is equally busy for all.
            found = asyncio.run(all_delays([front.url for front in fronts.values()], base, vad))
            local = spread(found[0], unit="ms")
            for way, times in zip([*fronts, "REST, asked directly"], found, strict=True):
                row = {key: value * 1000 for key, value in spread(times, unit="ms").items()}
                added = {f"added_{key}": row[key] - local[key] * 1000 for key in row}
                rows[f"{mode}, {way}"] = {"turns": len(times)} | row | added
        show("from the end of a turn to its transcript", rows)
        return rows


async def all_delays(urls: list[str], base: str, vad: bool) -> list[list[float]]:
    """Return the delays of the servers at these URLs, and of `asked_directly`."""
    ways = [delays(url, vad, NUM_FINALS) for url in urls] + [asked_directly(base)]
    return list(await asyncio.gather(*ways))


async def asked_directly(base: str) -> list[float]:
    """Return the seconds that the server itself takes for the file of a turn, asked as often as the fronts ask."""
    found = list[float]()
    async with httpx.AsyncClient(timeout=30) as client:
        for number in range(NUM_FINALS):
            await asyncio.sleep(NUM_WORDS * 10 * FRAME / SAMPLE_RATE_HZ)
            data = on_pcm(speech(1 + NUM_WORDS * number % 400, NUM_WORDS))
            file = {"file": ("turn.wav", wav_header(SAMPLE_RATE_HZ, len(data)) + data)}
            form = {"model": "default", "response_format": "verbose_json"}
            since_s = time.monotonic()
            answer = await client.post(f"{base}/audio/transcriptions", data=form, files=file)
            found.append(time.monotonic() - since_s)
            assert answer.status_code == 200, answer.text
    return found


# --- killed -----------------------------------------------------------------------------------------------------------


async def killed_turns(front: Host, backs: list[Host], turns: int) -> dict[str, Any]:
    wrong, times, kills = 0, list[float](), 0
    async with Session(front.url, PATH, configured(vad=True)) as session:
        for number in range(turns):
            since, first = len(session.events), 1 + NUM_WORDS * number % 400
            pcm = np.concatenate((speech(first, NUM_WORDS), np.zeros(30 * FRAME, np.float32)))
            speaking = asyncio.create_task(speak(session, pcm, time.monotonic()))
            await asyncio.sleep(KILLED_AT * 10 * FRAME / SAMPLE_RATE_HZ)
            used = next((back for back in backs if running(front, back)), None)
            if used:
                kills += 1
                used.kill()
            await speaking
            at_s, event = await session.first((COMPLETED, FAILED), since, 60)
            times.append(at_s - await session.until("input_audio_buffer.speech_stopped", since))
            said = event.get("transcript", "").split()
            wrong += sum(word not in said for word in text(first, NUM_WORDS).split())
            wrong += len(said) - len(set(said))
            print(f"turn {number + 1}: {kills} killed, {wrong} words lost or wrong", flush=True)
            if used:
                used.start()
                await asyncio.to_thread(used.wait)
                while front.metric(f'antiphon_remote_away{{role="transcriber",server="127.0.0.1:{used.port}"}}'):
                    await asyncio.sleep(0.1)
    return {"turns": turns, "kills": kills, "words": turns * NUM_WORDS, "lost_or_wrong": wrong} | spread(times, "final")


def running(front: Host, back: Host) -> bool:
    return front.metric(f'antiphon_remote_running{{role="transcriber",server="127.0.0.1:{back.port}"}}') > 0


def killed(turns: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        backs = [stack.enter_context(host(f"back{k}", folder)) for k in range(2)]
        urls = ",".join(f"{back.url}/v1" for back in backs)
        front = stack.enter_context(host("front", folder, f"{urls}#default"))
        found = asyncio.run(killed_turns(front, backs, turns))
    show("a server is killed in the middle of each turn", [found])
    return found


# --- front ------------------------------------------------------------------------------------------------------------


async def conversation(url: str, pcm: bytes, number: int, count: int) -> list[float]:
    """Hold one conversation. Return the seconds from the end of each turn to the first word of its answer."""
    found, step = list[float](), int(0.1 * 24_000) * 2
    vad = {"type": "server_vad", "silence_duration_ms": 300}
    session = {"type": "realtime", "output_modalities": ["text"], "audio": {"input": {"turn_detection": vad}}}
    async with Session(url, "/v1/realtime?model=gpt-realtime", {"session": session}) as caller:
        # The callers do not speak at the same time.
        await asyncio.sleep(SENTENCE_S * number / count)
        for _ in range(NUM_SENTENCES):
            since, since_s = len(caller.events), time.monotonic()
            for at in range(0, len(pcm), step):
                await asyncio.sleep(max(0.0, since_s + (at + step) / 48_000 - time.monotonic()))
                await caller.append(pcm[at : at + step])
            try:
                stopped_s = await caller.until("input_audio_buffer.speech_stopped", since, 20)
                after = next(k for k, (at_s, _) in enumerate(caller.events) if at_s >= stopped_s)
                found.append(await caller.until("response.output_text.delta", after, 20) - stopped_s)
            except TimeoutError:
                found.append(float("inf"))
    return found


def front(count: int) -> dict[str, Any]:
    sound = decode_all(str(RECORDING))
    silence = np.zeros(max(0, int(SENTENCE_S * SAMPLE_RATE_HZ) - len(sound)), np.float32)
    pcm = on_wire(np.concatenate((sound, silence)))
    with tempfile.TemporaryDirectory() as name, beside("bench.scripted_models") as (base, _):
        flags = ("--transcriber", f"{base}#scripted", "--language-model", f"{base}#scripted", "--synthesizer", "none")
        flags = (*flags, "--turn-detector", "none", "--burst-sessions", "1000", "--profile", "default")
        with host("front", Path(name), "", *flags, module=("antiphon", "serve")) as server:
            process = psutil.Process(pid_of(server.port))
            idle_s = -cpu_s(process)
            time.sleep(IDLE_S)
            idle_s += cpu_s(process)
            idle_mb, before_s, since_s = process.memory_info().rss / 1e6, cpu_s(process), time.monotonic()
            found = asyncio.run(callers(server.url, pcm, count))
            took_s, used_s = time.monotonic() - since_s, cpu_s(process) - before_s
            mb = process.memory_info().rss / 1e6
    times = [t for one in found for t in one]
    answered = [t for t in times if t != float("inf")]
    row = {
        "conversations": count,
        "answers": f"{len(answered)} of {count * NUM_SENTENCES}",
        "core_each_percent": 100 * used_s / took_s / count,
        "front_cores": used_s / took_s,
        "idle_cores": idle_s / IDLE_S,
        "mb_each": (mb - idle_mb) / count,
        "mb_idle": idle_mb,
    } | spread(answered, "first_word")
    show("a front without models", [row])
    return row


async def callers(url: str, pcm: bytes, count: int) -> list[list[float]]:
    async def one(number: int) -> list[float]:
        try:
            return await conversation(url, pcm, number, count)
        except SessionEnded as ended:
            print(f"conversation {number}: {ended}")
            return [float("inf")] * NUM_SENTENCES

    return await together(count, one)


def pid_of(port: int) -> int:
    """Return the process that listens on a port."""
    return next(
        c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.status == "LISTEN"
    )


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = options("antiphon bench remote", __doc__, ("finals", "killed", "front"))
    parser.add_argument("--turns", type=int, default=40, help="turns in which a server is killed [%(default)s]")
    parser.add_argument("--conversations", type=int, default=100, help="conversations of a front [%(default)s]")
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    measured(
        "remote",
        args.sections,
        {"finals": finals, "killed": lambda: killed(args.turns), "front": lambda: front(args.conversations)},
        commit=commit,
    )


if __name__ == "__main__":
    main()
