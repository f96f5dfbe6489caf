"""A language model on engine servers (`--engine vllm:URL`): rows kept, rows taken back, what it adds, a server's death.

    antiphon bench engines --sections kept,streams --vllm URL --folder FOLDER
    antiphon bench engines --sections added,killed,hundred

`kept` and `streams` ask a real vLLM and antiphon's own engine in turn, on the same cores, with the same rows. The
others ask scripted servers, processes of their own, which give tokens at the speed of a fast GPU: what is measured is
antiphon.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import websockets

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import HERE, Server, percentile, server
from transformers import AutoTokenizer

from antiphon.adapters.causal_lm.model import CausalLm
from antiphon.adapters.spec import EngineModelOptions
from antiphon.engine.api import Engine, Sampling, Session
from antiphon.engine.vllm import EngineServers

USER_ROWS, ANSWER_ROWS, TURNS = 20, 12, 20
TOKENS_A_S, PREFILL_A_S = 120, 20_000
STORY = (
    "Once upon a time there was a small town by the sea. Nobody knew who had built it, or when. In the mornings the "
    "fog came up from the harbour and lay in the streets until noon. Then the sun came out, and the boats went out."
)


# --- a real vLLM, beside the local engine ----------------------------------------------------------------------------


async def first_token(session: Session) -> float:
    """Milliseconds to the first token of a generation of ANSWER_ROWS."""
    begun, first = time.perf_counter(), 0.0
    async with aclosing(session.generate(Sampling(max_tokens=ANSWER_ROWS))) as tokens:
        async for _ in tokens:
            first = first or time.perf_counter() - begun
    return first * 1000


async def kept_rows(engine: Engine, words: range, rounds: int) -> dict[str, list[float]]:
    """First tokens of conversations of TURNS turns, then after rows were taken back and others given."""
    draw, found = random.Random(1), dict[str, list[float]]()

    def some(count: int) -> list[int]:
        return [draw.choice(words) for _ in range(count)]

    for number in range(rounds + 1):
        session = await engine.open(owner=number)
        session.append(some(40))
        for turn in range(1, TURNS + 1):
            session.append(some(USER_ROWS))
            took = await first_token(session)
            if number and turn in (2, 10, TURNS):
                found.setdefault(f"turn {turn}", []).append(took)
        for count in (8, 40, 200):
            session.rollback(session.length - count)
            session.append(some(USER_ROWS))
            took = await first_token(session)
            if number:
                found.setdefault(f"rolled back by {count}", []).append(took)
        session.close()
    return found


async def streamed(engine: Engine, words: range, sessions: int, loads: int) -> tuple[float, float, float]:
    """Tokens a second of so many sessions, the longest gap of one, and that while a session loads `loads` rows."""
    draw = random.Random(2)
    opened = [await engine.open() for _ in range(sessions)]
    for session in opened:
        session.append([draw.choice(words) for _ in range(60)])
    times: list[list[float]] = [[] for _ in opened]

    async def read(session: Session, at: list[float]) -> None:
        async with aclosing(session.generate(Sampling(max_tokens=60))) as tokens:
            async for _ in tokens:
                at.append(time.perf_counter())

    begun = time.perf_counter()
    await asyncio.gather(*(read(s, at) for s, at in zip(opened, times, strict=True)))
    took = time.perf_counter() - begun
    longest = max(b - a for at in times for a, b in itertools.pairwise(at))
    for at in times:
        at.clear()

    async def load() -> None:
        await asyncio.sleep(0.3)
        other = await engine.open()
        other.append([draw.choice(words) for _ in range(loads)])
        async with aclosing(other.generate(Sampling(max_tokens=1))) as tokens:
            async for _ in tokens:
                pass
        other.close()

    await asyncio.gather(load(), *(read(s, at) for s, at in zip(opened, times, strict=True)))
    loading = max(b - a for at in times for a, b in itertools.pairwise(at))
    for session in opened:
        session.close()
    return sessions * 60 / took, longest * 1000, loading * 1000


@contextmanager
def engines(vllm: str, folder: Path, packed: Path | None) -> Iterator[dict[str, CausalLm]]:
    """The local engine with the weights that vLLM has, the same packed as int8 where they are given, and vLLM."""
    with ExitStack() as stack:
        made = {}
        chosen = [("local", folder, None), ("vllm", folder, EngineServers("vllm", (vllm,), first_token_s=120))]
        if packed:
            chosen.insert(1, ("local int8", packed, None))
        for name, weights, servers in chosen:
            made[name] = CausalLm(weights, "model", EngineModelOptions(servers=servers))
            stack.callback(made[name].close)
        yield made


def kept(vllm: str, folder: Path, packed: Path | None, rounds: int) -> list[dict[str, Any]]:
    rows = []
    with engines(vllm, folder, packed) as made:
        for name, model in made.items():
            for what, values in asyncio.run(kept_rows(model.engine, range(1000, 9000), rounds)).items():
                rows.append({"engine": name, "first token at": what, "p50_ms": percentile(values, 50)})
    return rows


def streams(vllm: str, folder: Path, packed: Path | None, rounds: int) -> list[dict[str, Any]]:
    rows = []
    with engines(vllm, folder, packed) as made:
        for model in made.values():
            # The first steps of a shape choose and compile their kernels.
            asyncio.run(streamed(model.engine, range(1000, 9000), 2, 300))
        for count in (1, 8, 16):
            for name, model in made.items():
                rate, gap, loading = asyncio.run(streamed(model.engine, range(1000, 9000), count, 1500))
                rows.append(
                    {"engine": name, "sessions": count, "tokens_a_s": rate, "longest_gap_ms": gap}
                    | {"longest_gap_while_1500_load_ms": loading}
                )
    return rows


# --- scripted servers -------------------------------------------------------------------------------------------------


@contextmanager
def scripted(folder: Path, text: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A scripted vLLM's URL, and its process."""
    command = [sys.executable, str(HERE / "engine_servers.py"), "--serve", str(folder), text]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def serve_scripted(folder: Path, text: str) -> None:
    """Serve until the process is killed. Prints the URL."""
    from tests.engine.vllm.scripted_vllm import ScriptedVllm

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    found = ScriptedVllm(tokenizer.backend_tokenizer, len(tokenizer), context_rows=8192, eos=tokenizer.eos_token_id)
    opening = tokenizer.encode("<|im_start|>assistant\n")
    answer = [*tokenizer.encode(text), tokenizer.eos_token_id]

    def following(rows: list[int]) -> int:
        start = next(
            (i for i in range(len(rows) - len(opening), -1, -1) if rows[i : i + len(opening)] == opening), len(rows)
        )
        return answer[min(len(rows) - start - len(opening), len(answer) - 1)]

    found.following, found.token_s, found.keeps_bodies = following, 1 / TOKENS_A_S, False
    print(found.url, flush=True)
    time.sleep(1e6)


class Talk:
    """A conversation in text, or spoken."""

    def __init__(self, socket: websockets.ClientConnection) -> None:
        self.socket = socket

    async def say(self, type: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": type} | fields))

    async def until(self, kind: str) -> dict[str, Any]:
        while (event := json.loads(await self.socket.recv()))["type"] != kind:
            if event["type"] == "error":
                raise RuntimeError(event)
        return event  # type: ignore[no-any-return]

    async def ask(self, text: str) -> None:
        content = [{"type": "input_text", "text": text}]
        await self.say("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        await self.until("conversation.item.done")

    async def first_word(self) -> float:
        """Milliseconds from a response.create to the first word; the answer is read to its end."""
        begun = time.perf_counter()
        await self.say("response.create")
        await self.until("response.output_text.delta")
        first = time.perf_counter() - begun
        await self.until("response.done")
        return first * 1000


async def raw_first_token(client: httpx.AsyncClient, url: str, rows: int) -> float:
    """Milliseconds to the first token from the server itself, for a prompt of so many rows."""
    body = {
        "model": "smollm2",
        "prompt": [5] * rows,
        "max_tokens": 20,
        "stream": True,
        "return_token_ids": True,
        "stop_token_ids": [],
        "ignore_eos": True,
        "cache_salt": "raw",
    }
    begun, first = time.perf_counter(), 0.0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and not first:
                first = time.perf_counter() - begun
    return first * 1000


def added(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """What antiphon adds to the first token of a scripted engine: it has none of its own but its 8 ms a token."""
    rows = []
    with (
        scripted(folder, "It is noon.") as (url, _),
        server("--engine", f"vllm:{url}", "--language-model", str(folder), "--synthesizer", "none") as front,
    ):

        async def measure(turns: int) -> dict[str, list[float]]:
            found: dict[str, list[float]] = {"the server itself": [], "conversation": []}
            async with (
                httpx.AsyncClient(timeout=60) as client,
                websockets.connect(f"{front.ws}/v1/realtime?model=gpt-realtime", max_size=None) as socket,
            ):
                talk = Talk(socket)
                await talk.say("session.update", session={"type": "realtime", "output_modalities": ["text"]})
                await talk.until("session.updated")
                for _ in range(turns):
                    await talk.ask("What time is it in the town by the sea, and is it raining there?")
                    await talk.first_word()
                for _ in range(rounds):
                    found["the server itself"].append(await raw_first_token(client, url, 40 * turns))
                    await talk.ask("And now?")
                    found["conversation"].append(await talk.first_word())
            return found

        for turns in (1, 20):
            found = asyncio.run(measure(turns))
            itself = found["the server itself"]
            for name, values in found.items():
                more = [b - a for a, b in zip(itself, values, strict=True)]
                rows.append(
                    {"turns": turns, "asked": name, "rounds": rounds}
                    | {f"first_token_p{q}_ms": percentile(values, q) for q in (50, 95)}
                    | {f"added_p{q}_ms": percentile(more, q) for q in (50, 95)}
                )
    return rows


def killed(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """The gap in the sound that a user hears where the server of an answer is killed, and the words that came."""
    gaps, wrong = [], 0
    for _ in range(max(3, rounds // 10)):
        with (
            scripted(folder, STORY) as (one, first),
            scripted(folder, STORY) as (two, _),
            server("--engine", f"vllm:{one},{two}", "--language-model", str(folder)) as front,
        ):
            gap, said = asyncio.run(_heard(front.ws, first))
            gaps.append(gap)
            wrong += said != STORY
    return [
        {"answers": len(gaps), "wrong_words": wrong, "gap_p50_ms": statistics.median(gaps), "gap_max_ms": max(gaps)}
    ]


async def _heard(ws: str, victim: subprocess.Popen[str]) -> tuple[float, str]:
    """The longest silence of a player that plays what has come at once, in milliseconds, and the answer's words."""
    async with websockets.connect(f"{ws}/v1/realtime?model=gpt-realtime", max_size=None) as socket:
        talk = Talk(socket)
        await talk.until("session.created")
        await talk.ask("Tell me a story.")
        await talk.say("response.create")
        plays_until, gap, said, killed_already = 0.0, 0.0, "", False
        while True:
            event = json.loads(await socket.recv())
            now = time.perf_counter()
            match event["type"]:
                case "response.output_audio.delta":
                    seconds = len(event["delta"]) * 3 / 4 / 2 / 24_000
                    if plays_until:
                        gap = max(gap, now - plays_until)
                    plays_until = max(plays_until, now) + seconds
                    if not killed_already:
                        victim.kill()
                        killed_already = True
                case "response.output_audio_transcript.delta":
                    said += event["delta"]
                case "response.done":
                    return max(0.0, gap) * 1000, said


def hundred(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Conversations in text on one engine, each with a turn in every six seconds: the front's CPU, and first words."""
    rows = []
    for count in (1, 50, 100, 200):
        with (
            scripted(folder, STORY) as (url, _),
            server(
                *("--engine", f"vllm:{url}", "--language-model", str(folder), "--synthesizer", "none"),
                *("--max-sessions", "400", "--sessions-per-key", "400"),
            ) as front,
        ):
            rows.append(asyncio.run(_crowd(front, count, 30.0)))
    return rows


async def _crowd(front: Server, count: int, seconds: float) -> dict[str, Any]:
    draw, firsts = random.Random(3), list[float]()

    async def one() -> None:
        async with websockets.connect(f"{front.ws}/v1/realtime?model=gpt-realtime", max_size=None) as socket:
            talk = Talk(socket)
            await talk.say("session.update", session={"type": "realtime", "output_modalities": ["text"]})
            await talk.until("session.updated")
            await asyncio.sleep(draw.random() * 6)
            while time.perf_counter() < end:
                begun = time.perf_counter()
                await talk.ask("What is it like there at noon?")
                firsts.append(await talk.first_word())
                await asyncio.sleep(max(0.0, 6 - (time.perf_counter() - begun)))

    end = time.perf_counter() + seconds
    before, begun = front.cpu_s(), time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    cpu = (front.cpu_s() - before) / (time.perf_counter() - begun)
    return {
        "conversations": count,
        "turns": len(firsts),
        "first_word_p50_ms": percentile(firsts, 50),
        "first_word_p95_ms": percentile(firsts, 95),
        "front_cores": cpu,
        "front_cpu_ms_a_turn": cpu * seconds / max(1, len(firsts)) * 1000,
    }


SECTIONS: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "kept": kept,
    "streams": streams,
    "added": added,
    "killed": killed,
    "hundred": hundred,
}
# Those that ask a real vLLM.
REAL = ("kept", "streams")

if __name__ == "__main__":
    assert sys.argv[1] == "--serve"
    serve_scripted(Path(sys.argv[2]), sys.argv[3])
