"""Clients that are silent between turns: they send no audio while they are not spoken into, as push-to-talk does."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import soxr
from bench import words as wer
from bench.common import Server, table
from bench.hearing.client import WIRE_HZ, Client, Heard, whole_files
from bench.hearing.clips import Clip

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import from_pcm16

# Answers are spoken, so that the server is as busy as in a conversation.
MODELS = ("--language-model", "smollm2-135m-instruct", "--synthesizer", "hibari-heart")
INSTRUCTIONS = "Answer in one long sentence."
# After each question and its silence, nothing is sent for so long.
NOTHING_S = 4.0
CHUNK_S = 0.04
# Clients begin so long after each other.
STAGGER_S = 0.7
QUESTIONS = (
    "Who painted the Mona Lisa?",
    "Which planet is the largest?",
    "Who wrote Romeo and Juliet?",
    "What is two plus two?",
    "Recommend a simple pasta recipe.",
    "What is the capital of France?",
    "How far away is the moon?",
    "Tell me a short joke.",
    "What time does the museum open?",
    "How do I reset my password?",
    "Where can I buy a train ticket?",
    "Is it going to rain tomorrow?",
    "How many people live in London?",
    "What is the tallest mountain in the world?",
    "Please turn off the kitchen lights.",
    "Can you spell the word elephant?",
    "When did the war end?",
    "Why is the sky blue?",
    "Set a timer for ten minutes.",
    "What should I cook for dinner?",
    "Who was the first man on the moon?",
    "How do airplanes fly?",
    "Read me the news of today.",
    "What does this button do?",
    "Call my sister on her mobile.",
    "Which bus goes to the station?",
    "Do you know any good books?",
    "How long does it take to boil an egg?",
    "Play some quiet music.",
    "Where is the nearest pharmacy?",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One question and what one client heard of it. It is whole if it came as one turn and with all its words."""

    question: str
    turns: tuple[str, ...]
    whole: bool


async def spoken(srv: Server) -> list[Clip]:
    """The questions in the server's own voice."""
    clips = []
    async with httpx.AsyncClient(base_url=srv.url, timeout=60) as http:
        for number, text in enumerate(QUESTIONS):
            body = {"input": text, "response_format": "pcm"}
            answer = await http.post("/v1/audio/speech", json=body)
            answer.raise_for_status()
            pcm = np.asarray(soxr.resample(from_pcm16(answer.content), WIRE_HZ, SAMPLE_RATE_HZ), np.float32)
            seconds = len(pcm) / SAMPLE_RATE_HZ
            clips.append(Clip(f"q{number}", Path(), seconds, text, "en", "question", 0.0, seconds, pcm=pcm))
    return clips


def judged(clip: Clip, heard: Heard, alone: str) -> Answer:
    """`alone`: the transcript of the question's sound as a file, whose words do as well as those of the question."""
    turns = tuple(text for _, text in heard.finals)
    words = [wer.norm(text) for text in (clip.text, alone)]
    return Answer(clip.text, turns, len(turns) == 1 and wer.norm(turns[0]) in words)


async def ask(
    srv: Server, clips: Sequence[Clip], silence_s: float, delay_s: float, alone: dict[str, str]
) -> list[Answer]:
    """Ask some questions in one conversation, with so much silence sent after each."""
    silence = np.zeros(int(silence_s * SAMPLE_RATE_HZ), np.float32)
    session = {"transcription": {"model": "whisper-1"}}
    await asyncio.sleep(delay_s)
    heard = []
    async with Client(srv, chunk_s=CHUNK_S, session=session, instructions=INSTRUCTIONS) as client:
        for clip in clips:
            heard.append(client.begin())
            await client.play(np.concatenate((clip.pcm, silence)))
            await asyncio.sleep(NOTHING_S)
        await client.drained()
    return [judged(c, h, alone[c.id]) for c, h in zip(clips, heard, strict=True)]


async def silent(srv: Server, counts: Sequence[int], silences_s: Sequence[float], num_questions: int) -> dict[str, Any]:
    """How many of the questions come out whole, shared by so many clients at once, in real time.

    silences_s: seconds of silence that are sent after each question. From half a second on a turn is over in any case;
    a shorter gap than a second and a half in the sound's time gives the next turn this one as context.
    """
    clips = await spoken(srv)
    alone = {name: text.text for name, text in (await whole_files(srv, clips)).items()}
    asked = [clips[k % len(clips)] for k in range(num_questions)]
    rows = {}
    for count, silence_s in itertools.product(counts, silences_s):
        shares = [ask(srv, asked[k::count], silence_s, STAGGER_S * k, alone) for k in range(count)]
        answers = [a for part in await asyncio.gather(*shares) for a in part]
        rows[f"{count} clients, {silence_s:g} s"] = {
            "questions": len(answers),
            "whole": sum(a.whole for a in answers),
            "broken": [(a.question, list(a.turns)) for a in answers if not a.whole],
        }
    table(
        "questions that came out whole, of clients that send some silence and then nothing",
        ("clients, silence", "questions", "whole"),
        [(n, r["questions"], r["whole"]) for n, r in rows.items()],
    )
    broken = [(n, question, " | ".join(turns)) for n, r in rows.items() for question, turns in r["broken"]]
    table("broken", ("clients, silence", "question", "heard"), broken)
    return rows
