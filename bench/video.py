"""Video sessions without a vision model: reading text and answering, delays, frame filters, a long session.

    antiphon bench video [--data DIR] [--sections filters,seeing,answers,intake,long] [--minutes N]

It uses a real server with the default models, real clips, and frames as JPEG over /v1/video/chat/stream.
"""

from __future__ import annotations

import asyncio
import io
import json
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
from bench.common import Server, measured, options, percentile, server, show
from bench.models import SHAPES
from tests.adapters import tiny_vlm as tiny_pictures
from tokenizers import Tokenizer

from antiphon.adapters.spec import EngineModelOptions
from antiphon.adapters.vlm.session import VisionLanguageModel
from antiphon.client import Client, ClientVideo
from antiphon.contracts import ReplyOptions, VideoFrame, VideoQuestion
from antiphon.loading.loader import prepare, store_of
from antiphon.loading.selection import selected_models
from antiphon.settings import EngineOptions, Settings
from antiphon.vision.frame_filters import BlockFilter, EvsFilter
from antiphon.vision.images import EncodedImage

FRAMES_A_S = 2.0
# Questions that the text on the images answers.
READABLE = {"vid-paris-signs": ("blue street sign", "company name")}
SETTLED_S = 1.5
INTAKE_FRAMES = 400
CONFIG = {"frame_filter": "blocks"}


@dataclass
class Clip:
    """The facts of a clip, and its frames (FRAMES_A_S per second) as (seconds, pixels)."""

    facts: dict[str, Any]
    frames: list[tuple[float, np.ndarray]]


def clips(data: Path) -> list[Clip]:
    """Return all clips of a folder with a manifest."""
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


def jpeg(pixels: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=85)
    return file.getvalue()


async def shown(video: ClientVideo, frames: Iterable[tuple[float, bytes]]) -> int:
    """Show frames, each with its second. Wait until all are taken or dropped, and return how many were taken."""
    count = taken = 0
    for at_s, image in frames:
        await video.show(image, at_s)
        count += 1
    while count:
        match await video.link.receive():
            case {"type": "video.frame.ack", "accepted": accepted}:
                count, taken = count - 1, taken + accepted
            case {"type": "error", "message": message}:
                raise RuntimeError(message)
    return taken


async def asked(video: ClientVideo, text: str) -> tuple[str, float]:
    """Ask a question. Return the answer, and the seconds to its first text."""
    began, first_s, words = time.perf_counter(), 0.0, ""
    async for word in video.stream(text):
        first_s = first_s or time.perf_counter() - began
        words += word
    return words, first_s or time.perf_counter() - began


def filters(all_clips: list[Clip]) -> list[dict[str, Any]]:
    """Measure the share of frames that are kept, and the events that are missed.

    An event or cut counts as seen if a frame within its tolerance is kept. The clip's first frame does not count.
    """
    rows = []
    for name, kind, threshold in (
        ("evs", EvsFilter, 0.95), ("evs", EvsFilter, 0.99),
        ("blocks", BlockFilter, 0.9), ("blocks", BlockFilter, 0.95), ("blocks", BlockFilter, 0.99),
    ):  # fmt: skip
        kept = total = events = missed = 0
        for clip in all_clips:
            it = kind(threshold)
            times = [at for at, pixels in clip.frames if it.keeps(pixels)]
            kept, total = kept + len(times), total + len(clip.frames)
            slack = clip.facts["event_tolerance_s"]
            spans = [(a - slack, b + slack) for a, b in (e["t"] for e in clip.facts["events"])]
            spans += [(cut - 0.01, cut + slack) for cut in clip.facts["scene_cuts"]]
            events += len(spans)
            missed += sum(not any(a <= at <= b for at in times[1:]) for a, b in spans)
        part = kept / total
        rows.append({"filter": name, "threshold": threshold, "kept": part, "missed": missed, "events": events})
    show("filters, all clips at 2 frames a second", rows)
    return rows


async def answers(srv: Server, all_clips: list[Clip]) -> dict[str, Any]:
    """Ask about text on the screen, and about what cannot be seen. Delays are measured after all frames were read."""
    right = read = honest = unseen = 0
    first_s: list[float] = []
    every = []
    for clip in all_clips:
        readable = READABLE.get(clip.facts["id"], ())
        async with Client(srv.url) as client, client.video(config=CONFIG) as video:
            taken = await shown(video, [(at_s, jpeg(pixels)) for at_s, pixels in clip.frames])
            await asyncio.sleep(SETTLED_S * max(4, taken) if readable else 12)
            for qa in clip.facts["qa"]:
                text, took = await asked(video, qa["q"])
                first_s.append(took)
                good = any(a.lower() in text.lower() for a in qa["accept"])
                if any(part in qa["q"] for part in readable):
                    read, right = read + 1, right + good
                else:
                    good = None
                    unseen += 1
                    honest += text.startswith("I cannot see")
                known = {"clip": clip.facts["id"], "q": qa["q"]}
                every.append(known | {"a": text, "right": good, "first_s": round(took, 3)})
                print(f"  {clip.facts['id']:16} {qa['q'][:50]:50} {'+' if good else ' '} {took:5.2f} s  {text[:90]}")
    found = {
        "readable_right": right,
        "readable": read,
        "not_seen_said_so": honest,
        "not_seen": unseen,
        "first_text_s_p50": percentile(first_s, 50),
        "first_text_s_p95": percentile(first_s, 95),
    }
    show("default profile", [found])
    return found | {"answers": every}


async def intake(srv: Server, all_clips: list[Clip]) -> dict[str, Any]:
    """Measure the frames per second that the machine takes from one clip of 640 pixels' width, at full speed."""
    clip = next(c for c in all_clips if c.facts["id"] == "vid-bottles")
    data = [jpeg(pixels) for _, pixels in clip.frames]
    async with Client(srv.url) as client, client.video(config=CONFIG | {"max_frames": 64}) as video:
        began = time.perf_counter()
        await shown(video, ((number / 30, data[number % len(data)]) for number in range(INTAKE_FRAMES)))
        rate = INTAKE_FRAMES / (time.perf_counter() - began)
    found = {"frames_a_s": round(rate, 1), "pixels": list(clip.frames[0][1].shape[1::-1])}
    show("intake", [found])
    return found


async def long(srv: Server, all_clips: list[Clip], minutes: float) -> dict[str, Any]:
    """Send some minutes of video at full speed: 2 frames per second of video, and a question per minute of it."""
    frames = [jpeg(p) for c in all_clips for _, p in c.frames]
    rss, first_s = list[float](), list[float]()
    async with Client(srv.url) as client, client.video(config=CONFIG | {"max_memory_s": 120}) as video:
        count = int(minutes * 60 * FRAMES_A_S)
        for start in range(0, count, 120):
            numbers = range(start, min(count, start + 120))
            await shown(video, [(number / FRAMES_A_S, frames[number % len(frames)]) for number in numbers])
            first_s.append((await asked(video, "What can be read now?"))[1])
            rss.append(srv.rss_mb())
    third = max(1, len(first_s) // 3)
    early, late = percentile(first_s[:third], 50), percentile(first_s[-third:], 50)
    print(
        f"\n{minutes:g} minutes of frames at 2 a second: first text {early:.2f} s in the first third, {late:.2f} s in"
    )
    print(f"the last; {rss[min(2, len(rss) - 1)]:.0f} MB after three questions, {rss[-1]:.0f} MB at the end")
    return {"minutes": minutes, "first_text_s": [round(s, 3) for s in first_s], "rss_mb": [round(r, 1) for r in rss]}


async def seeing(questions: int = 20) -> dict[str, Any]:
    """Measure the first token of each question with SmolVLM-256M's dimensions and random weights.

    Two frames arrive between questions. Frames are prefilled when they arrive, or all rows when the question is asked.
    """
    # SmolVLM uses SmolLM2's tokenizer, and the time of a question depends on its number of tokens.
    settings = Settings(engine=EngineOptions(language_model="smollm2-135m-instruct"))
    weights = prepare(settings, store_of(settings.models), selected_models(settings, ("language",))[0])
    words, shape = Tokenizer.from_file(str(weights / "tokenizer.json")), SHAPES["SmolVLM-256M"]
    with tempfile.TemporaryDirectory() as folder:
        tiny_pictures.write(Path(folder), tokenizer=words, text=shape["text_config"], vision=shape["vision_config"])
        model = VisionLanguageModel(Path(folder), "smolvlm-256m", EngineModelOptions(weights="bf16"))
    rng = np.random.default_rng(0)
    frames = [jpeg(rng.integers(0, 255, (360, 640, 3)).astype(np.uint8)) for _ in range(8)]
    reply, ever, stats = ReplyOptions(max_tokens=1), tuple(range(2 * questions)), model.engine.runner.stats

    async def watch(watching: Any, first: int, stop: int) -> float:
        """Show frames. Return the seconds per frame."""
        began = time.perf_counter()
        for k in range(first, stop):
            await watching.append_frame(VideoFrame(k, k / 2, EncodedImage(frames[k % 8])))
            watching.select_frames(ever)
        await watching.session.settle()
        return (time.perf_counter() - began) / (stop - first)

    async def first_s(watching: Any) -> float:
        began = time.perf_counter()
        async for _ in watching.answer_text(VideoQuestion("What is on the screen now?", 0.0, ever), reply):
            pass
        return time.perf_counter() - began

    watching = await model.open("")
    took_s, frame_s, rows = list[float](), list[float](), list[int]()
    for number in range(questions):
        began, length = stats.rows, watching.session.length
        frame_s.append(await watch(watching, 2 * number, 2 * number + 2))
        before = stats.rows
        took_s.append(await first_s(watching))
        # Only new rows were computed, and the one row that the last generation left uncomputed. The first question also
        # computes the system turn.
        new = watching.session.length - (length if number else 0)
        assert stats.rows - began <= new + 1, (stats.rows - began, new)
        rows.append(stats.rows - before)
    watching.close()
    again_s = {}
    for number in [n for n in (1, 4, 9, questions - 1) if n < questions]:
        fresh = await model.open("")
        await watch(fresh, 0, 2 * number + 2)
        again_s[number] = await first_s(fresh)
        fresh.close()
    model.close()
    show(
        "SmolVLM-256M dimensions, random weights, 2 frames a question: first token",
        [{"question": n + 1, "as they come, s": took_s[n], "rows": rows[n], "again, s": again_s[n]} for n in again_s],
    )
    found = {"first_token_s": took_s, "frame_s": percentile(frame_s, 50), "rows_computed": rows}
    print(f"prefill of a frame: {found['frame_s']:.2f} s")
    return {"eager": found | {"ratio_20_to_2": took_s[-1] / took_s[1]}, "again": {"first_token_s": again_s}}


def main() -> None:
    parser = options("antiphon bench video", __doc__, ("filters", "seeing", "answers", "intake", "long"))
    parser.add_argument("--data", type=Path, required=True, help="folder with a manifest.jsonl and clips")
    parser.add_argument("--minutes", type=float, default=30)
    args = parser.parse_args()
    all_clips = clips(args.data)
    with ExitStack() as stack:
        front = cache(lambda: stack.enter_context(server()))
        sections = {
            "filters": lambda: filters(all_clips),
            "seeing": lambda: asyncio.run(seeing()),
            "answers": lambda: asyncio.run(answers(front(), all_clips)),
            "intake": lambda: asyncio.run(intake(front(), all_clips)),
            "long": lambda: asyncio.run(long(front(), all_clips, args.minutes)),
        }
        measured("video", args.sections, sections, data=args.data.name)


if __name__ == "__main__":
    main()
