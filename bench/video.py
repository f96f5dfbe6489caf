"""Video sessions: what is read and answered without a model that sees, how soon, which frames the filters keep, and
half an hour of frames.

    antiphon bench video [--data DIR] [--sections filters,seeing,answers,intake,long] [--minutes N]

A real server with the default models, real clips, frames as JPEG over /v1/video/chat/stream.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import websockets
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import RESULTS, Server, machine, percentile, save, server, table
from tests.adapters import tiny_vlm as tiny_pictures

from antiphon.adapters.spec import EngineModelOptions
from antiphon.adapters.vlm.session import VisionLanguageModel
from antiphon.contracts import ReplyOptions, VideoFrame, VideoQuestion
from antiphon.loading.loader import prepare, store_of
from antiphon.loading.selection import selected_models
from antiphon.settings import EngineOptions, Settings
from antiphon.vision.frame_filters import BlockFilter, EvsFilter
from antiphon.vision.images import EncodedImage

FRAMES_A_S = 2.0
# Questions that the text on the pictures answers.
READABLE = {"vid-paris-signs": ("blue street sign", "company name")}
SETTLED_S = 1.5


@dataclass
class Clip:
    """A clip's facts, and its frames at FRAMES_A_S: seconds, pixels."""

    facts: dict[str, Any]
    frames: list[tuple[float, np.ndarray]]


def clips(data: Path) -> list[Clip]:
    """All clips of a folder with a manifest."""
    out = []
    for line in (data / "manifest.jsonl").read_text().splitlines():
        facts = json.loads(line)
        if facts["kind"] != "video":
            continue
        frames, last = [], -1.0
        with av.open(str(data / facts["path"])) as container:
            for frame in container.decode(video=0):
                if last < 0 or frame.time - last >= 1 / FRAMES_A_S - 1e-3:
                    last = frame.time
                    frames.append((frame.time, frame.to_ndarray(format="rgb24")))
        out.append(Clip(facts, frames))
    return out


def jpeg(pixels: np.ndarray) -> str:
    """In base64."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=85)
    return base64.b64encode(file.getvalue()).decode()


class Client:
    """One session: sends, and remembers what came when."""

    def __init__(self, url: str, **config: Any) -> None:
        self._url = f"{url.replace('http', 'ws', 1)}/v1/video/chat/stream"
        self._config = config
        self.acks: dict[str, bool] = {}
        self.events: asyncio.Queue[tuple[float, dict[str, Any]]] = asyncio.Queue()

    async def __aenter__(self) -> Client:
        self._socket = await websockets.connect(self._url, max_size=None)
        await self.send("session.config", **({"modalities": ["text"], "frame_filter": "blocks"} | self._config))
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        await self._socket.close()

    async def send(self, kind: str, **fields: Any) -> None:
        await self._socket.send(json.dumps({"type": kind} | fields))

    async def _read(self) -> None:
        async for text in self._socket:
            event = json.loads(text)
            if event["type"] == "video.frame.ack":
                self.acks[event["frame_id"]] = event["accepted"]
            else:
                await self.events.put((time.perf_counter(), event))

    async def show(self, number: int, at_s: float, data: str) -> None:
        await self.send("video.frame", frame_id=str(number), pts_ms=round(at_s * 1000), data=data)

    async def taken(self, count: int) -> None:
        while len(self.acks) < count:
            await asyncio.sleep(0.01)

    async def ask(self, text: str) -> tuple[str, float]:
        """The answer, and the seconds to its first text."""
        began, first = time.perf_counter(), 0.0
        await self.send("video.query", text=text)
        while True:
            at, event = await self.events.get()
            if event["type"] == "response.text.delta" and not first:
                first = at - began
            elif event["type"] == "response.text.done":
                return event["text"], first or at - began
            elif event["type"] == "error":
                raise SystemExit(event["message"])


def filters(all_clips: list[Clip]) -> list[dict[str, Any]]:
    """Fraction kept and events missed:
    an event, or a cut, is seen if a frame after the first is kept within its tolerance.
    """
    rows = []
    for name, kind, threshold in (
        ("evs", EvsFilter, 0.95), ("evs", EvsFilter, 0.99),
        ("blocks", BlockFilter, 0.9), ("blocks", BlockFilter, 0.95), ("blocks", BlockFilter, 0.99),
    ):  # fmt: skip
        kept = total = events = missed = 0
        static_kept = static = 0
        for clip in all_clips:
            it = kind(threshold)
            times = [at for at, pixels in clip.frames if it.keeps(pixels)]
            kept, total = kept + len(times), total + len(clip.frames)
            slack = clip.facts["event_tolerance_s"]
            spans = [(a - slack, b + slack) for a, b in (e["t"] for e in clip.facts["events"])]
            spans += [(cut - 0.01, cut + slack) for cut in clip.facts["scene_cuts"]]
            events += len(spans)
            missed += sum(not any(a <= at <= b for at in times[1:]) for a, b in spans)
            # Between a clip's events nothing happens, where the clip is said to have them all.
            if clip.facts["id"] in ("vid-one-by-one", "vid-bottles"):
                still = [at for at, _ in clip.frames[1:] if not any(a <= at <= b for a, b in spans)]
                static += len(still)
                static_kept += sum(at in times for at in still)
        rows.append(
            {
                "filter": name,
                "threshold": threshold,
                "kept": kept / total,
                "missed": missed,
                "events": events,
                "static_kept": static_kept / static,
            }
        )
    table(
        "Filters, all clips at 2 frames a second",
        ["filter", "threshold", "kept", "events missed", "kept between events"],
        [
            [
                r["filter"],
                r["threshold"],
                f"{r['kept']:.0%}",
                f"{r['missed']} of {r['events']}",
                f"{r['static_kept']:.0%}",
            ]
            for r in rows
        ],
    )
    return rows


async def answers(srv: Server, all_clips: list[Clip]) -> dict[str, Any]:
    """On-screen text, and what cannot be seen; latency with all frames read."""
    right = asked = honest = unseen = 0
    first_s: list[float] = []
    shown = []
    for clip in all_clips:
        readable = READABLE.get(clip.facts["id"], ())
        async with Client(srv.url) as client:
            for number, (at, pixels) in enumerate(clip.frames):
                await client.show(number, at, jpeg(pixels))
            await client.taken(len(clip.frames))
            await asyncio.sleep(SETTLED_S * max(4, sum(client.acks.values())) if readable else 12)
            for qa in clip.facts["qa"]:
                text, took = await client.ask(qa["q"])
                first_s.append(took)
                good = any(a.lower() in text.lower() for a in qa["accept"])
                if any(part in qa["q"] for part in readable):
                    asked, right = asked + 1, right + good
                else:
                    good = None
                    unseen += 1
                    honest += text.startswith("I cannot see")
                shown.append(
                    {"clip": clip.facts["id"], "q": qa["q"], "a": text, "right": good, "first_s": round(took, 3)}
                )
                print(f"  {clip.facts['id']:16} {qa['q'][:50]:50} {'+' if good else ' '} {took:5.2f} s  {text[:90]}")
    found = {
        "readable_right": right,
        "readable": asked,
        "not_seen_said_so": honest,
        "not_seen": unseen,
        "first_text_s_p50": percentile(first_s, 50),
        "first_text_s_p95": percentile(first_s, 95),
        "answers": shown,
    }
    table(
        "Default profile",
        ["on-screen text", "said it cannot see", "first text p50 / p95"],
        [
            [
                f"{right} of {asked}",
                f"{honest} of {unseen}",
                f"{found['first_text_s_p50']:.2f} / {found['first_text_s_p95']:.2f} s",
            ]
        ],
    )
    return found


async def intake(srv: Server, all_clips: list[Clip]) -> dict[str, Any]:
    """Frames a second the box takes in: all of a clip, as fast as they are taken, in 640 pixels of width."""
    clip = next(c for c in all_clips if c.facts["id"] == "vid-bottles")
    data = [jpeg(pixels) for _, pixels in clip.frames]
    count = 400
    async with Client(srv.url, max_frames=64) as client:
        began = time.perf_counter()
        for number in range(count):
            await client.show(number, number / 30, data[number % len(data)])
        await client.taken(count)
        rate = count / (time.perf_counter() - began)
    table(
        "Intake",
        ["frames a second", "of pixels"],
        [[round(rate, 1), "x".join(map(str, clip.frames[0][1].shape[1::-1]))]],
    )
    return {"frames_a_s": round(rate, 1), "pixels": list(clip.frames[0][1].shape[1::-1])}


async def long(srv: Server, all_clips: list[Clip], minutes: float) -> dict[str, Any]:
    """Frames at 2 a second for so long, a question a minute; ten times as fast as they would come."""
    frames = [jpeg(p) for c in all_clips for _, p in c.frames]
    process = srv.process
    rss, first_s = [], []
    async with Client(srv.url, max_memory_s=120) as client:
        count = int(minutes * 60 * FRAMES_A_S)
        for number in range(count):
            await client.show(number, number / FRAMES_A_S, frames[number % len(frames)])
            if number % 120 == 119:
                await client.taken(number + 1)
                _, took = await client.ask("What can be read now?")
                first_s.append(took)
                rss.append(process.memory_info().rss / 1e6)
    found = {
        "minutes": minutes,
        "first_text_s": [round(s, 3) for s in first_s],
        "rss_mb": [round(r, 1) for r in rss],
    }
    third = max(1, len(first_s) // 3)
    table(
        f"{minutes:g} minutes of frames at 2 a second",
        ["first text, first third / last third p50", "RSS after 3 questions / at the end"],
        [
            [
                f"{percentile(first_s[:third], 50):.2f} / {percentile(first_s[-third:], 50):.2f} s",
                f"{rss[min(2, len(rss) - 1)]:.0f} / {rss[-1]:.0f} MB",
            ]
        ],
    )
    return found


async def seeing(questions: int = 20) -> dict[str, Any]:
    """SmolVLM-256M's dimensions, random weights:
    first token of each question, two frames between questions, against everything given anew.
    """
    # SmolVLM's text is SmolLM2's: what a question costs depends on how it is cut into tokens.
    settings = Settings(engine=EngineOptions(language_model="smollm2-135m-instruct"))
    store = store_of(settings.models)
    words = Tokenizer.from_file(
        str(prepare(settings, store, selected_models(settings, ("language",))[0]) / "tokenizer.json")
    )
    with tempfile.TemporaryDirectory() as folder:
        tiny_pictures.write(
            Path(folder),
            tokenizer=words,
            text={
                "vocab_size": 49280,
                "hidden_size": 576,
                "intermediate_size": 1536,
                "num_hidden_layers": 30,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "max_position_embeddings": 8192,
            },
            vision={
                "hidden_size": 768,
                "intermediate_size": 3072,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                "image_size": 512,
                "patch_size": 16,
            },
        )
        model = VisionLanguageModel(Path(folder), "smolvlm-256m", EngineModelOptions(weights="bf16"))
    rng = np.random.default_rng(0)
    frames = [base64.b64decode(jpeg(rng.integers(0, 255, (360, 640, 3)).astype(np.uint8))) for _ in range(8)]
    options, ever = ReplyOptions(max_tokens=1), tuple(range(2 * questions))
    stats = model.engine.runner.stats

    async def show(watching: Any, first: int, stop: int) -> float:
        began = time.perf_counter()
        for k in range(first, stop):
            await watching.append_frame(VideoFrame(k, k / 2, EncodedImage(frames[k % 8])))
            watching.select_frames(ever)
        await watching.session.settle()
        return (time.perf_counter() - began) / (stop - first)

    async def first_s(watching: Any) -> float:
        began = time.perf_counter()
        async for _ in watching.answer_text(VideoQuestion("What is on the screen now?", 0.0, ever), options):
            pass
        return time.perf_counter() - began

    found: dict[str, Any] = {}
    for prefill in ("eager", "query"):
        model.prefill = prefill  # type: ignore[assignment]
        watching = await model.open("")
        took_s, frame_s, rows = [], [], []
        for number in range(questions):
            began, length = stats.rows, watching.session.length
            frame_s.append(await show(watching, 2 * number, 2 * number + 2))
            shown = stats.rows
            took_s.append(await first_s(watching))
            # What was computed is what was new, and the row a generation had left; of the first question, the system
            # turn too.
            new = watching.session.length - (length if number else 0)
            assert stats.rows - began <= new + 1, (stats.rows - began, new)
            rows.append(stats.rows - shown)
        watching.close()
        found[prefill] = {
            "first_token_s": took_s,
            "frame_s": percentile(frame_s, 50),
            "rows_computed": rows,
            "ratio_20_to_2": took_s[-1] / took_s[1],
        }
    anew_s, shown_at = {}, [n for n in (1, 4, 9, questions - 1) if n < questions]
    for number in shown_at:
        fresh = await model.open("")
        await show(fresh, 0, 2 * number + 2)
        anew_s[number] = await first_s(fresh)
        fresh.close()
    model.close()
    found["anew"] = {"first_token_s": anew_s}
    table(
        "SmolVLM-256M dimensions, random weights, 2 frames a question",
        ["question", "eager: first token, rows", "query: first token, rows", "given anew"],
        [
            [
                n + 1,
                *(f"{found[p]['first_token_s'][n]:.3f} s, {found[p]['rows_computed'][n]}" for p in ("eager", "query")),
                f"{anew_s[n]:.2f} s",
            ]
            for n in shown_at
        ],
    )
    for prefill in ("eager", "query"):
        print(
            f"{prefill}: first token of question {questions} to that of question 2: "
            f"{found[prefill]['ratio_20_to_2']:.2f}; "
            f"a frame takes {found[prefill]['frame_s']:.2f} s when it comes"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="antiphon bench video", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with a manifest.jsonl and clips")
    parser.add_argument("--sections", default="filters,seeing,answers,intake,long")
    parser.add_argument("--minutes", type=float, default=30)
    args = parser.parse_args()
    wanted = set(args.sections.split(","))
    document: dict[str, Any] = {"machine": machine(), "data": args.data.name}
    if (before := RESULTS / "video.json").is_file():
        document = json.loads(before.read_text()) | document
    all_clips = clips(args.data)
    if "filters" in wanted:
        document["filters"] = filters(all_clips)
    if "seeing" in wanted:
        document["seeing"] = asyncio.run(seeing())
    if wanted - {"filters", "seeing"}:
        with server() as srv:
            if "answers" in wanted:
                document["answers"] = asyncio.run(answers(srv, all_clips))
            if "intake" in wanted:
                document["intake"] = asyncio.run(intake(srv, all_clips))
            if "long" in wanted:
                document["long"] = asyncio.run(long(srv, all_clips, args.minutes))
    print(f"\nwritten: {save('video', document)}")


if __name__ == "__main__":
    main()
