"""A language model on an engine server (`--engine vllm:URL`): kept rows, rollbacks, added delay, a server's death.

    antiphon bench engines --sections kept,streams --vllm URL --folder FOLDER
    antiphon bench engines --sections added,killed,hundred

`kept` and `streams` query a real vLLM and antiphon's own engine in turn, on the same cores, with the same rows. The
other sections query scripted servers in separate processes. Those generate tokens at the speed of a fast GPU without
computing anything, so only antiphon is measured.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, aclosing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from bench.common import Server, beside, percentile, server, spread, together
from bench.engines import beside_itself, first_event_ms
from bench.realtime import TEXT_ALONE, talking
from transformers import AutoTokenizer

from antiphon.adapters.causal_lm.model import CausalLm
from antiphon.adapters.spec import EngineModelOptions
from antiphon.client import AudioToPlay, Client, ResponseEnds
from antiphon.engine.api import Engine, Sampling, Session
from antiphon.remote.engine import EngineServers

USER_ROWS, ANSWER_ROWS, TURNS, TOKENS_A_S = 20, 12, 20, 120
WORDS = range(1000, 9000)
STORY = (
    "Once upon a time there was a small town by the sea. Nobody knew who had built it, or when. In the mornings the "
    "fog came up from the harbour and lay in the streets until noon. Then the sun came out, and the boats went out."
)


# --- a real vLLM, and the local engine -----------------------------------------------------------------------------


async def first_token_ms(session: Session, count: int = ANSWER_ROWS) -> float:
    """Generate `count` tokens, and return the milliseconds to the first of them."""
    begun = time.perf_counter()
    return ((await stamps(session, count))[0] - begun) * 1000


async def stamps(session: Session, count: int) -> list[float]:
    """Generate `count` tokens, and return the time of each."""
    async with aclosing(session.generate(Sampling(max_tokens=count))) as tokens:
        return [time.perf_counter() async for _ in tokens]


def some(draw: random.Random, count: int) -> list[int]:
    return [draw.choice(WORDS) for _ in range(count)]


async def kept_rows(engine: Engine, rounds: int) -> dict[str, list[float]]:
    """Measure first tokens in conversations of TURNS turns, then after a rollback that is followed by new rows."""
    draw, found = random.Random(1), dict[str, list[float]]()
    for number in range(rounds + 1):
        session = await engine.open(owner=number)
        session.append(some(draw, 40))
        for turn in range(1, TURNS + 1):
            session.append(some(draw, USER_ROWS))
            took = await first_token_ms(session)
            if number and turn in (2, 10, TURNS):
                found.setdefault(f"turn {turn}", []).append(took)
        for count in (8, 40, 200):
            session.rollback(session.length - count)
            session.append(some(draw, USER_ROWS))
            took = await first_token_ms(session)
            if number:
                found.setdefault(f"rolled back by {count}", []).append(took)
        session.close()
    return found


async def streamed(engine: Engine, count: int, loads: int) -> tuple[float, float, float]:
    """Return the tokens per second of all sessions together, and the longest gap in one of them, in ms.

    The third figure is the longest gap during a prefill of `loads` rows, which another session starts.
    """
    draw = random.Random(2)
    opened = [await engine.open() for _ in range(count)]
    for session in opened:
        session.append(some(draw, 60))

    async def read() -> float:
        times = await together(count, lambda n: stamps(opened[n], 60))
        return max(b - a for each in times for a, b in pairwise(each)) * 1000

    begun = time.perf_counter()
    longest = await read()
    took = time.perf_counter() - begun

    async def load() -> None:
        await asyncio.sleep(0.3)
        other = await engine.open()
        other.append(some(draw, loads))
        await stamps(other, 1)
        other.close()

    _, loading = await asyncio.gather(load(), read())
    for session in opened:
        session.close()
    return count * 60 / took, longest, loading


@contextmanager
def engines(vllm: str, folder: Path, packed: Path | None) -> Iterator[dict[str, CausalLm]]:
    """Yield the engines by name: local with vLLM's weights, local with int8 weights (if `packed`), and vLLM."""
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
            for what, values in asyncio.run(kept_rows(model.engine, rounds)).items():
                rows.append({"engine": name, "first token at": what, "p50_ms": percentile(values, 50)})
    return rows


def streams(vllm: str, folder: Path, packed: Path | None, rounds: int) -> list[dict[str, Any]]:
    rows = []
    with engines(vllm, folder, packed) as made:
        for model in made.values():
            # The first steps of each shape choose and compile kernels.
            asyncio.run(streamed(model.engine, 2, 300))
        for count in (1, 8, 16):
            for name, model in made.items():
                rate, gap, loading = asyncio.run(streamed(model.engine, count, 1500))
                rows.append(
                    {"engine": name, "sessions": count, "tokens_a_s": rate, "longest_gap_ms": gap}
                    | {"longest_gap_while_1500_load_ms": loading}
                )
    return rows


# --- scripted servers -------------------------------------------------------------------------------------------------


def scripted(folder: Path, text: str) -> AbstractContextManager[tuple[str, subprocess.Popen[str]]]:
    """Start a scripted vLLM. Yields its URL and its process."""
    return beside("bench.engine_servers", "--serve", str(folder), text)


def serve_scripted(folder: Path, text: str) -> None:
    """Print the URL, and serve until the process is killed."""
    from tests.remote.engine.scripted_vllm import ScriptedVllm

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


def added(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Measure antiphon's share of the time to the first token of a scripted engine that takes only 8 ms per token."""
    prompt = {"model": "smollm2", "max_tokens": 20, "return_token_ids": True, "stop_token_ids": [], "ignore_eos": True}

    async def measure(url: str, front: Server, turns: int) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {"the server itself": [], "conversation": []}
        body = prompt | {"prompt": [5] * 40 * turns, "cache_salt": "raw"}
        async with httpx.AsyncClient(timeout=60) as client, talking(front.ws, TEXT_ALONE) as talk:
            for _ in range(turns):
                await talk.add("user", "What time is it in the town by the sea, and is it raining there?")
                await talk.first_word_ms()
            for _ in range(rounds):
                found["the server itself"].append(await first_event_ms(client, f"{url}/v1/completions", body))
                await talk.add("user", "And now?")
                found["conversation"].append(await talk.first_word_ms())
        return found

    with (
        scripted(folder, "It is noon.") as (url, _),
        server("--engine", f"vllm:{url}", "--language-model", str(folder), "--synthesizer", "none") as front,
    ):
        return [
            row
            for turns in (1, 20)
            for row in beside_itself("first_token", turns, asyncio.run(measure(url, front, turns)))
        ]


def killed(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Kill the server that generates an answer.

    Measure the gap in the user's audio, and count the words that arrived.
    """
    gaps, wrong = [], 0
    for _ in range(max(3, rounds // 10)):
        with (
            scripted(folder, STORY) as (one, first),
            scripted(folder, STORY) as (two, _),
            server("--engine", f"vllm:{one},{two}", "--language-model", str(folder)) as front,
        ):
            gap, said = asyncio.run(_heard(front.url, first))
            gaps.append(gap)
            wrong += said != STORY
    return [{"answers": len(gaps), "wrong_words": wrong, "gap_p50_ms": percentile(gaps, 50), "gap_max_ms": max(gaps)}]


async def _heard(url: str, victim: subprocess.Popen[str]) -> tuple[float, str]:
    """Return the longest silence, in ms, of a player that plays audio when it arrives, and the words of the answer."""
    plays_until, gap = 0.0, 0.0
    async with Client(url) as client, client.conversation() as talk:
        await talk.send_text("Tell me a story.")
        async for event in talk:
            now = time.perf_counter()
            match event:
                case AudioToPlay():
                    if plays_until:
                        gap = max(gap, now - plays_until)
                    else:
                        victim.kill()
                    plays_until = max(plays_until, now) + (event.end_ms - event.start_ms) / 1000
                case ResponseEnds():
                    return gap * 1000, event.text
    raise RuntimeError("the conversation ended without an answer")


def hundred(folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Run text conversations on one engine, each with a turn every six seconds. Measure CPU time and first words."""
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

    async def one(_: int) -> None:
        async with talking(front.ws, TEXT_ALONE) as talk:
            await asyncio.sleep(draw.random() * 6)
            while time.perf_counter() < end:
                begun = time.perf_counter()
                await talk.add("user", "What is it like there at noon?")
                firsts.append(await talk.first_word_ms())
                await asyncio.sleep(max(0.0, 6 - (time.perf_counter() - begun)))

    end = time.perf_counter() + seconds
    before, begun = front.cpu_s(), time.perf_counter()
    await together(count, one)
    cpu = (front.cpu_s() - before) / (time.perf_counter() - begun)
    found = {"conversations": count, "turns": len(firsts)} | spread(firsts, "first_word", "ms")
    return found | {"front_cores": cpu, "front_cpu_ms_a_turn": cpu * seconds / max(1, len(firsts)) * 1000}


SECTIONS: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "kept": kept,
    "streams": streams,
    "added": added,
    "killed": killed,
    "hundred": hundred,
}
# The sections that query a real vLLM.
REAL = ("kept", "streams")

if __name__ == "__main__":
    assert sys.argv[1] == "--serve"
    serve_scripted(Path(sys.argv[2]), sys.argv[3])
