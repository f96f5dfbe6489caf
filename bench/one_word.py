"""One-word answers over a telephone line, beside the same words at 16 kHz: turns found, words right, time to the end.

    python -m bench.one_word [--data DIR] [--words N] [--sentences N] [--sections server_vad,semantic_vad]

Each word is one turn of a transcription session with the default models: VAD, turn detector, Whisper. The telephone
line is a band of 300 to 3,400 Hz, 8 kHz and µ-law, as a carrier sends it. Three kinds of words:

- recorded: whole recordings of up to three words (yes, no, hello, cards).
- cut: words of longer recordings, which have no pauses around them: yes, no, numbers, names, and others up to --words.
  A whole file is transcribed with word times first. Only words that are transcribed as the reference has them are cut.
  So the words are known to be heard in their sentence, at 16 kHz.
- spoken: yes, no, digits and names, synthesized by the voice hibari-heart.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np
import soxr
from bench import words as wer
from bench.carrier import RATE_HZ as LINE_HZ
from bench.common import Server, measured, options, percentile, server, show
from bench.driver import WIRE_HZ
from bench.hearing.client import FILE_TIMEOUT_S, Listener, transcribe_file
from bench.hearing.clips import Clip, loaded, read_manifest, spread, with_data
from bench.hearing.figures import difference

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.line.g711 import to_ulaw
from antiphon.audio.pcm import Resampler, from_pcm16

BAND_HZ = (300, 3400)
STREAMS, TRAIL_S, TURN_S = 3, 1.5, 0.5
RECORDED_WORDS = 3
# Seconds before and after a word that is cut out of a sentence, and of the fades at both ends.
MARGIN_S, FADE_S = 0.04, 0.02
# Words that are shorter are cut through by the times that the transcriber gives them.
LEAST_S, MOST_S = 0.16, 1.2
LEVEL_DB = -26.0
ANSWERS = {"yes", "no", "yeah", "okay", "right", "hello"}
NUMBERS = set(wer.ONES[:14])
NAMES = ("Anna", "Michael", "Sarah", "Thomas", "Maria", "Peter", "Susan", "David", "Emma", "Robert")
VOICE, VOICE_HZ = "heart", 24_000
MODES = ("server_vad", "semantic_vad")


@dataclass(frozen=True, slots=True)
class Word:
    """One turn. `kind`: recorded, cut or spoken. `group`: answers, numbers, names or others."""

    id: str
    kind: str
    group: str
    text: str
    pcm: Pcm


@dataclass(frozen=True, slots=True)
class Heard:
    """What a session made of one word. `end_ms`: from the end of the word to `speech_stopped`; None without a turn."""

    text: str
    num_turns: int
    end_ms: float | None


def in_band(pcm: Pcm) -> Pcm:
    """Return what is left of 16 kHz audio in the band of a telephone line."""
    spectrum = np.fft.rfft(pcm)
    hz = np.fft.rfftfreq(len(pcm), 1 / SAMPLE_RATE_HZ)
    # The edges fall over 100 Hz, as those of a real filter do.
    gain = np.clip((hz - BAND_HZ[0] + 100) / 100, 0, 1) * np.clip((BAND_HZ[1] + 100 - hz) / 100, 0, 1)
    return np.fft.irfft(spectrum * gain, len(pcm)).astype(np.float32)


def levelled(pcm: Pcm) -> Pcm:
    """Return a word at LEVEL_DB, with faded ends."""
    fade = int(FADE_S * SAMPLE_RATE_HZ)
    shape = np.ones(len(pcm), np.float32)
    shape[:fade], shape[-fade:] = np.linspace(0, 1, fade), np.linspace(1, 0, fade)
    rms = float(np.sqrt(np.mean(pcm**2))) or 1.0
    return np.clip(pcm * shape * np.float32(10 ** (LEVEL_DB / 20) / rms), -1, 1)


def group_of(text: str, shown: str) -> str:
    """Return the group of a normalized word, which the reference spells as `shown`."""
    if set(text.split()) & NUMBERS:
        return "numbers"
    if text in ANSWERS:
        return "answers"
    return "names" if shown[:1].isupper() else "others"


def recorded(clips: Sequence[Clip]) -> list[Word]:
    """Return the recordings that are no longer than RECORDED_WORDS words."""
    short = [c for c in clips if c.language == "en" and c.text and len(wer.norm(c.text)) <= RECORDED_WORDS]
    texts = {c.id: " ".join(wer.norm(c.text)) for c in short}
    return [Word(c.id, "recorded", group_of(texts[c.id], ""), texts[c.id], levelled(c.pcm)) for c in loaded(short)]


async def cut(srv: Server, clips: Sequence[Clip], most: int, sentences: int) -> list[Word]:
    """Return words out of sentences: all answers, numbers and names, and others up to `most` words together."""
    longer = [c for c in clips if c.language == "en" and len(c.text.split()) > RECORDED_WORDS and c.seconds < 30]
    found: list[Word] = []
    async with httpx.AsyncClient(base_url=srv.url, timeout=FILE_TIMEOUT_S) as http:
        for clip in loaded(spread(longer, sentences)):
            words = (await transcribe_file(http, clip.pcm, language="en", word_times=True)).words
            found += words_in(clip, words)
    wanted = [w for w in found if w.group != "others"]
    others = [w for w in found if w.group == "others"]
    step = max(1, len(others) // max(1, most - len(wanted)))
    return (wanted + others[::step])[:most]


def words_in(clip: Clip, times: Sequence[tuple[str, float, float]]) -> list[Word]:
    """Return the words of a sentence that its transcript, with start and end in seconds, has as its reference."""
    reference = [w for w in clip.text.split() if wer.norm(w)]
    expected = [" ".join(wer.norm(w)) for w in reference]
    heard = [" ".join(wer.norm(text)) for text, _, _ in times]
    out = []
    for a, b, size in difflib.SequenceMatcher(None, expected, heard, autojunk=False).get_matching_blocks():
        # The neighbours have to match too, or the times are not those of this word.
        for k in range(1, size - 1):
            start_s, end_s = times[b + k][1:]
            text, shown = expected[a + k], reference[a + k]
            if len(text) >= 2 and " " not in text and LEAST_S <= end_s - start_s <= MOST_S:
                is_known = text in ANSWERS or text in NUMBERS or shown[:1].isupper()
                if is_known or len(text) >= 5:
                    first, last = (int(s * SAMPLE_RATE_HZ) for s in (max(0, start_s - MARGIN_S), end_s + MARGIN_S))
                    pcm = levelled(clip.pcm[first:last])
                    out.append(Word(f"{clip.id}:{a + k}", "cut", group_of(text, shown), text, pcm))
    return out


async def spoken(srv: Server) -> list[Word]:
    """Return synthesized answers, digits and names."""
    out = []
    async with httpx.AsyncClient(base_url=srv.url, timeout=FILE_TIMEOUT_S) as http:
        for text in ("Yes", "No", "Hello", "Okay", *(w.capitalize() for w in wer.ONES[:10]), *NAMES):
            body = {"model": "default", "voice": VOICE, "input": f"{text}.", "response_format": "pcm"}
            answer = (await http.post("/v1/audio/speech", json=body)).raise_for_status()
            pcm = np.asarray(soxr.resample(from_pcm16(answer.content), VOICE_HZ, SAMPLE_RATE_HZ), np.float32)
            loud = np.flatnonzero(np.abs(pcm) > 0.01)
            word = levelled(pcm[max(0, loud[0] - 800) : loud[-1] + 800])
            group = "names" if text in NAMES else group_of(text.lower(), "")
            out.append(Word(f"spoken:{text.lower()}", "spoken", group, text.lower(), word))
    return out


class Line(Listener):
    """A session whose caller says one word, and waits for the transcript, again and again."""

    def __init__(self, srv: Server, mode: str, *, narrow: bool) -> None:
        session: dict[str, Any] = {"turn_detection": {"type": mode}, "transcription": {"language": "en"}}
        if narrow:
            session["format"] = {"type": "audio/pcmu"}
        super().__init__(srv, session=session)
        self._resampler = Resampler(WIRE_HZ, LINE_HZ) if narrow else None

    async def append(self, pcm: bytes) -> None:
        """Send audio of the client's own rate, on a telephone line as µ-law."""
        if self._resampler:
            pcm = to_ulaw(self._resampler.feed(from_pcm16(pcm)))
        await super().append(pcm)

    async def say(self, word: Word) -> Heard:
        """Say one word, and return what the session made of it."""
        since, begun_s = len(self.events), self.sent_s
        heard = self.begin()
        await self.play(word.pcm, TRAIL_S)
        await self.drained()
        stops = [e["audio_end_ms"] for e in self.of_type("input_audio_buffer.speech_stopped", since)]
        ends = begun_s * 1000 + len(word.pcm) / SAMPLE_RATE_HZ * 1000
        return Heard(heard.text, len(stops), stops[-1] - ends if stops else None)


async def hear(srv: Server, words: Sequence[Word], mode: str, *, narrow: bool) -> dict[str, Heard]:
    """Say all words over a few sessions at once."""

    async def some(part: Sequence[Word]) -> dict[str, Heard]:
        async with Line(srv, mode, narrow=narrow) as session:
            await session.play(np.zeros(0, np.float32), TURN_S)
            return {word.id: await session.say(word) for word in part}

    parts = await asyncio.gather(*(some(words[k::STREAMS]) for k in range(STREAMS)))
    return {name: heard for part in parts for name, heard in part.items()}


def is_right(word: Word, heard: Heard) -> bool:
    """Return whether exactly the word was heard."""
    return wer.score(word.text, heard.text)[0] == 0


def row(words: Sequence[Word], heard: dict[str, Heard]) -> dict[str, Any]:
    """Return how many turns and words were found."""
    ends = [h.end_ms for w in words if (h := heard[w.id]).end_ms is not None]
    return {
        "words": len(words),
        "no_turn": sum(not heard[w.id].num_turns for w in words),
        "two_turns": sum(heard[w.id].num_turns > 1 for w in words),
        "right": round(100 * sum(is_right(w, heard[w.id]) for w in words) / max(1, len(words)), 1),
        "end_p50_ms": round(percentile(ends, 50)),
        "end_p95_ms": round(percentile(ends, 95)),
    }


async def beside(srv: Server, words: Sequence[Word], mode: str) -> dict[str, Any]:
    """Measure a way of turn-taking on both bands. Returns the rows, the difference, and each word that differs."""
    narrow_words = [replace(w, pcm=in_band(w.pcm)) for w in words]
    wide = await hear(srv, words, mode, narrow=False)
    narrow = await hear(srv, narrow_words, mode, narrow=True)
    rows = {}
    for name, heard in (("16 kHz", wide), ("8 kHz", narrow)):
        for kind in dict.fromkeys(w.kind for w in words):
            rows[f"{name} {kind}"] = row([w for w in words if w.kind == kind], heard)
        for group in dict.fromkeys(w.group for w in words):
            rows[f"{name} {group}"] = row([w for w in words if w.group == group], heard)
        rows[f"{name} all"] = row(words, heard)
    show(f"one word is one turn, {mode}", rows)
    errors = [(int(not is_right(w, narrow[w.id])), int(not is_right(w, wide[w.id]))) for w in words]
    worse = difference(errors, [1] * len(words))
    print(f"wrong at 8 kHz less wrong at 16 kHz, in points: {worse}")
    differ = [
        {"id": w.id, "text": w.text, "wide": wide[w.id].text, "narrow": narrow[w.id].text}
        for w in words
        if is_right(w, wide[w.id]) != is_right(w, narrow[w.id])
    ]
    show("words that one band has and the other has not", differ)
    return {"rows": rows, "points": worse.points, "low": worse.low, "high": worse.high, "differ": differ}


async def collected(srv: Server, clips: list[Clip], most: int, sentences: int) -> list[Word]:
    """Return all words."""
    return recorded(clips) + await spoken(srv) + await cut(srv, clips, most, sentences)


def main() -> None:
    parser = with_data(options("python -m bench.one_word", __doc__, MODES))
    parser.add_argument("--words", type=int, default=160, help="most words out of sentences")
    parser.add_argument("--sentences", type=int, default=0, help="most sentences that words are cut out of; 0: all")
    args = parser.parse_args()
    clips = [c for c in read_manifest(args.data) if c.kind.startswith("asr_") and c.kind != "asr_noisy"]
    with server("--language-model", "none", "--synthesizer", "hibari-heart") as srv:
        print("collecting words", flush=True)
        words = asyncio.run(collected(srv, clips, args.words, args.sentences))
        sections = {mode: lambda mode=mode: asyncio.run(beside(srv, words, mode)) for mode in MODES}
        measured("one-word", args.sections, sections, data=args.data.name)


if __name__ == "__main__":
    main()
