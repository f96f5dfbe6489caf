"""Captions whose host is killed, and what keeping them costs: the section `captions` of `antiphon bench hosts`."""

from __future__ import annotations

import asyncio
import base64
import difflib
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from bench.common import spread
from tests.cluster.listeners import SILENCE_S as TURN_SILENCE_S
from tests.cluster.listeners import WORD_S, Listener
from tests.cluster.processes import Host, cluster, until
from tests.server.clients import b64
from tests.server.live.moving.test_transcription import SessionHost

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.certify.recordings import Recording, read_recordings
from antiphon.events.transcription import AppendAudio, ServerVad, TranscriptDelta, TranscriptDone, TranscriptionConfig
from antiphon.events.words import bare_word
from antiphon.loading.loaded import LoadedModels
from antiphon.loading.loader import load, store_of
from antiphon.settings import load as load_settings

DATA = Path("tests/data")
# Flags of hosts that only make captions.
CAPTIONS_ONLY = ("--no-pull", "--language-model", "none", "--synthesizer", "none", "--max-sessions", "50")
# Listeners of real recordings, and the turns of each. Silence after each turn, in seconds. The longest recording that
# they play, in seconds, so that the section takes less than two minutes.
LISTENERS, TURNS, SILENCE_S, MAX_PLAYED_S = 3, 14, 1.2, 6.0
# Seconds after the end of the audio within which all transcripts have to come, and seconds without another one after
# which no more are expected.
LATE_S, QUIET_S = 120.0, 4.0
# Seconds of audio in a message.
CHUNK_S = 0.1
# Interval between kills, in seconds, from the time at which both hosts are ready.
KILL_EVERY_S = 6.0
# The transcriber of `continued_captions`, and the seconds between two messages there.
STATES_TRANSCRIBER, STATES_PACE_S = "whisper-tiny.en", 0.05
# Listeners of the measurement of costs. The words of a turn, and the number of turns: short ones, and long sentences.
COST_LISTENERS, COST_TURNS = 20, ((12, 3), (40, 2))


class RecordedListener(Listener):
    """A listener that plays recordings. `words` has each word of the deltas with its arrival, from the start on."""

    def __init__(self, url: str, recordings: list[Recording], *, vllm: bool = False) -> None:
        super().__init__(0, [url], 0, vllm=vllm, is_exact=False)
        self._recordings = recordings
        self.began_s = 0.0

    async def play(self) -> None:
        """Play all recordings at the pace of speech, and wait for the last transcript."""
        silence = np.zeros(int(SILENCE_S * SAMPLE_RATE_HZ), np.float32)
        pcm = np.concatenate([part for each in self._recordings for part in (each.pcm, silence)])
        pcm16 = base64.b64decode(b64(pcm, self.rate_hz))
        step, self.began_s = round(CHUNK_S * self.rate_hz) * 2, time.monotonic()
        for number, at in enumerate(range(0, len(pcm16), step)):
            self.raise_failure()
            await asyncio.sleep(max(0.0, self.began_s + number * CHUNK_S - time.monotonic()))
            await self.send("input_audio_buffer.append", audio=base64.b64encode(pcm16[at : at + step]).decode())
        # A model may hear no words in a recording, or two turns. So it is over when nothing more comes. On a busy
        # machine, transcripts come late.
        async with asyncio.timeout(LATE_S):
            before = -1
            while self.captions.num_open or before < len(self.captions.completed):
                before = len(self.captions.completed)
                self.raise_failure()
                await asyncio.sleep(QUIET_S)

    @property
    def words(self) -> list[tuple[str, float]]:
        """The words of the deltas, each with the seconds from the start of the audio to its arrival."""
        return [
            (word, at_s - self.began_s)
            for text, at_s in self.captions.deltas
            for part in text.split()
            if (word := bare_word(part))
        ]


def played(state: str, *, kills: bool) -> tuple[list[RecordedListener], list[float]]:
    """Play the recordings to real hosts behind a door. Returns the listeners, and the times of the kills."""
    recordings = [each for each in read_recordings(DATA) if each.text and len(each.pcm) < MAX_PLAYED_S * SAMPLE_RATE_HZ]
    with cluster(state, "--host-ttl-s", "1.5", num_hosts=0) as hosts:
        for _ in range(2):
            hosts.add_host(*CAPTIONS_ONLY, module=("antiphon", "serve"))
        for host in hosts.hosts:
            host.wait()
        gate = hosts.add_door()
        gate.wait()
        chosen = [recordings[n % len(recordings)] for n in range(LISTENERS * TURNS)]
        listeners = [RecordedListener(gate.ws, chosen[n::LISTENERS]) for n in range(LISTENERS)]
        killed_s: list[float] = []

        def strike() -> None:
            until(lambda: sum(host.is_ready() for host in hosts.hosts) == 2, 120.0)
            host = max(hosts.hosts, key=Host.num_sessions)
            host.send(signal.SIGKILL)
            killed_s.append(time.monotonic())
            with suppress(httpx.HTTPStatusError):
                # If the report fails, the host's key expires.
                hosts.unregister(host)
            host.end()
            host.start()

        async def main() -> None:
            async def one(listener: RecordedListener) -> None:
                async with listener.connected():
                    await listener.play()

            async def killing() -> None:
                while kills:
                    await asyncio.sleep(KILL_EVERY_S)
                    await asyncio.to_thread(strike)

            async with asyncio.TaskGroup() as group:
                killer = group.create_task(killing())
                async with asyncio.TaskGroup() as inner:
                    for listener in listeners:
                        inner.create_task(one(listener))
                killer.cancel()

        asyncio.run(main())
        return listeners, killed_s


def compared(expected: Sequence[str], found: Sequence[str]) -> Counter[str]:
    """Return how many words of `expected` are lost, doubled (or added otherwise) and changed in `found`."""
    counts = Counter({"lost": 0, "doubled": 0, "changed": 0})
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, expected, found, autojunk=False).get_opcodes():
        counts["lost"] += max(0, (i2 - i1) - (j2 - j1))
        counts["doubled"] += max(0, (j2 - j1) - (i2 - i1))
        counts["changed"] += min(i2 - i1, j2 - j1) if tag == "replace" else 0
    return counts


def bare_words(texts: Sequence[str]) -> list[str]:
    return [word for text in texts for part in text.split() if (word := bare_word(part))]


def of_deltas(listeners: Sequence[RecordedListener]) -> dict[str, int]:
    """Compare the deltas of each turn with its transcript. The model itself finds other words later."""
    found = Counter({"lost": 0, "doubled": 0, "changed": 0})
    for listener in listeners:
        for transcript, streamed in zip(listener.captions.completed, listener.captions.streamed, strict=True):
            found.update(compared(bare_words([transcript]), bare_words([streamed])))
    return dict(found)


def killed_captions(state: str) -> dict[str, Any]:
    """Compare the captions of recordings whose host is killed again and again with those of hosts that live.

    Words are lost, doubled or changed in the transcripts. `deltas` compares the deltas of each turn with its
    transcript, and `deltas_undisturbed` those of the hosts that live.
    """
    whole, _ = played(state, kills=False)
    cut, killed_s = played(state, kills=True)
    counts = Counter[str]()
    gaps: list[float] = []
    for before, after in zip(whole, cut, strict=True):
        counts.update(compared(bare_words(before.captions.completed), bare_words(after.captions.completed)))
        expected, found = before.words, after.words
        matcher = difflib.SequenceMatcher(None, [w for w, _ in expected], [w for w, _ in found], autojunk=False)
        at: dict[int, int] = {}
        for _, i1, i2, j1, j2 in matcher.get_opcodes():
            at |= {j1 + n: i1 + min(n, i2 - i1 - 1) for n in range(j2 - j1) if i2 > i1}
        for struck_s in killed_s:
            since_s = struck_s - after.began_s
            following = next((j for j, (_, s) in enumerate(found) if s > since_s and j in at), None)
            if following is not None and expected[at[following]][1] > 0:
                gaps.append(max(0.0, found[following][1] - max(since_s, expected[at[following]][1])))
    words = len(bare_words([text for listener in whole for text in listener.captions.completed]))
    turns = sum(len(listener.captions.completed) for listener in cut)
    about = {"turns": turns, "words": words, "kills": len(killed_s), **counts}
    about |= {"deltas": of_deltas(cut), "deltas_undisturbed": of_deltas(whole)}
    return about | spread(gaps or [0.0], qs=(50, 95)) | {"gaps": len(gaps)}


def kept(state: str) -> dict[str, Any]:
    """Measure what keeping captions costs a host and its store, with scripted models: with and without keeping."""
    found: dict[str, Any] = {}
    for num_words, num_turns in COST_TURNS:
        kept, free = (spent(state, flag, num_words, num_turns) for flag in ("--store-captions", "--no-store-captions"))
        keeping = {key: value - free[key] for key, value in kept.items()}
        name = f"turns of {num_words} words"
        found |= {f"{name}, kept": kept, f"{name}, not kept": free, f"{name}, keeping": keeping}
    return found


def spent(state: str, flag: str, num_words: int, num_turns: int) -> dict[str, float]:
    """Return the share of a core and the bytes in the store that a captions session takes, with this flag.

    The measurement lasts as long as `num_turns` turns, so that it has whole turns of each listener.
    """
    flags = (flag, "--sessions-per-key", "500", "--max-sessions", "500", "--max-events-per-s", "2000")
    during_s = num_turns * (num_words * WORD_S + TURN_SILENCE_S)

    async def main(url: str, process: psutil.Process) -> dict[str, float]:
        async def one(listener: Listener) -> None:
            async with listener.connected():
                while True:
                    await listener.speak(num_words=num_words)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(Listener(number, [url], number))) for number in range(COST_LISTENERS)]
            await asyncio.sleep(3.0)
            cpu_s, sent = sum(process.cpu_times()[:2]), written_bytes(state)
            await asyncio.sleep(during_s)
            core = (sum(process.cpu_times()[:2]) - cpu_s) / during_s / COST_LISTENERS
            written_kb = (written_bytes(state) - sent) / 1000 / COST_LISTENERS / during_s * 60
            stored_kb = stored_bytes(state) / 1000 / COST_LISTENERS
            for task in tasks:
                task.cancel()
        return {"core": core, "written_kb_a_minute": written_kb, "stored_kb": stored_kb}

    with cluster(state, *flags, num_hosts=1) as hosts:
        gate = hosts.add_door()
        gate.wait()
        assert hosts.hosts[0].popen
        return asyncio.run(main(gate.ws, psutil.Process(hosts.hosts[0].popen.pid)))


def written_bytes(state: str) -> int:
    """Return the bytes that a Redis server has received; 0 for another store."""
    with suppress(ImportError):
        import redis

        if state.startswith("redis"):
            with redis.Redis.from_url(state) as server:
                return int(server.info("stats")["total_net_input_bytes"])
    return 0


def stored_bytes(state: str) -> int:
    """Return the memory of a Redis server's sessions, in bytes; 0 for another store."""
    with suppress(ImportError):
        import redis

        if state.startswith("redis"):
            with redis.Redis.from_url(state) as server:
                return sum(int(server.memory_usage(key) or 0) for key in server.scan_iter("*") if b"host" not in key)
    return 0


def continued_captions(_: str) -> dict[str, Any]:
    """Continue a session with real models and recordings from a state in the middle of each turn, in this process.

    Unlike `killed_captions`, it needs no pace: it counts words, and measures no time.
    """
    settings = load_settings({"language_model": "none", "synthesizer": "none", "transcriber": STATES_TRANSCRIBER})
    models = load(settings, store_of(settings.models))
    chance, recordings = random.Random(1), read_recordings(DATA)
    counts = Counter({"lost": 0, "doubled": 0, "changed": 0, "retracted": 0})
    config = TranscriptionConfig(vad=ServerVad(silence_duration_ms=500))
    for number in range(LISTENERS * TURNS):
        counts.update(asyncio.run(_continued(models, config, recordings[number % len(recordings)], chance)))
    models.close()
    return dict(counts)


async def _continued(
    models: LoadedModels, config: TranscriptionConfig, recording: Recording, chance: random.Random
) -> Counter[str]:
    pcm = np.concatenate([recording.pcm, np.zeros(int(SILENCE_S * SAMPLE_RATE_HZ), np.float32)])
    step = int(CHUNK_S * SAMPLE_RATE_HZ)
    messages = [[AppendAudio(pcm[at : at + step])] for at in range(0, len(pcm), step)]
    parts = {"transcriber": models.required_transcriber, "detector": models.required_vad, "pace_s": STATES_PACE_S}
    whole = SessionHost(config, **parts)
    await whole.run(messages)
    stored = chance.choice(whole.states)
    again = SessionHost(config, stored, **parts)
    await again.run(messages)
    seen = [*whole.events[: stored.num_events], *again.events]
    before, after = [" ".join(e.text for e in events if isinstance(e, TranscriptDone)).split()
                     for events in (whole.events, seen)]  # fmt: skip
    streamed = "".join(e.streamed for e in seen if isinstance(e, TranscriptDone))
    joined = "".join(e.text for e in seen if isinstance(e, TranscriptDelta))
    counts = Counter(turns=1, words=len(before), retracted=int(streamed != joined))
    counts["with_words_sent"] = int(any(isinstance(e, TranscriptDelta) for e in whole.events[: stored.num_events]))
    counts.update(compared(list(map(bare_word, before)), list(map(bare_word, after))))
    return counts
