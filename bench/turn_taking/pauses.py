"""Finds the pauses of recordings as the server sees them, and writes what the server knows in each of them.

    python -m bench.turn_taking.pauses DATA [--turn-detector DETECTORS --out FILE]

DATA is a folder with a manifest.jsonl. Every pause of at least 0.2 s becomes a row of bench/results/turns-pauses.json:
its length, the judgement of Smart Turn, the transcript of the turn so far, and the speaker. A pause is either inside a
turn, and the speaker then continues, or it is the end of a turn. Recordings that the file already has are skipped, so
an interrupted run can continue.

The VAD, the segmenter, Smart Turn and Whisper are the server's own, with the server's thresholds. Each recording is
followed by 3 s of noise like that of its quietest part.

With `--turn-detector`, as in `antiphon serve`, another detector or a blend judges in place of Smart Turn. Its rows
belong into a file of their own, from which fit.py makes a table.

- Real pauses: the pauses in recordings of a single speaker, and the pauses in AMI meetings during which nobody else
  speaks before the same speaker continues.
- Inserted pauses: 0.3 to 3 s of the recording's own noise, which are inserted into its deepest gap between two words.
- Ends: the ends of recordings whose last sentence is complete. If the text has punctuation, its last mark has to end a
  sentence. Corpora of complete sentences have no punctuation.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from bench.common import RESULTS
from bench.hearing.clips import rows_of
from bench.turn_taking.figures import frame_levels_db

from antiphon.adapters.silero.detector import FRAME_SAMPLES, SileroDetector
from antiphon.adapters.spec import LaneModelOptions
from antiphon.adapters.whisper.transcriber import WhisperTranscriber
from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.containers import decode_all
from antiphon.contracts import Window
from antiphon.errors import ModelError
from antiphon.events.transcription import ServerVad
from antiphon.loading.loader import load, store_of
from antiphon.settings import load as load_settings
from antiphon.store.registry import MODELS
from antiphon.turns.segmenter import Segmenter

PAUSES = RESULTS / "turns-pauses.json"
# As `semantic_vad`, but so patient that no pause ends a turn.
VAD = ServerVad(silence_duration_ms=60_000)
JUDGE_AFTER_S, JUDGE_AGAIN_S, TAIL_S = 0.2, 0.6, 3.0
NOISE_BELOW_DB = 40.0
# Number of characters kept from the end of a transcript.
MAX_CHARS = 160
ENDS_SENTENCE = (".", "?", "!", "»", "」", "。", "？")
# Corpora of complete sentences whose texts have no punctuation.
WHOLE_SENTENCES = {
    "AISHELL-1", "AMI", "Common Voice ja", "CosyVoice asset", "FLEURS", "FunASR asset", "LibriSpeech test-clean",
    "LibriSpeech test-other", "MFA tests", "Picovoice barista", "Picovoice cheetah", "Picovoice leopard",
    "pocketsphinx cards", "pocketsphinx librivox", "speechocean762", "tau2-bench", "F5-TTS asset",
}  # fmt: skip
KINDS = (
    "asr_8k_native", "asr_multilang", "asr_noisy", "asr_nonnative", "asr_read", "asr_short", "asr_speech",
    "asr_spontaneous_min", "backchannel", "command_slots", "conversation_rttm", "hesitation", "longform",
)  # fmt: skip
MIXED_KINDS = ("asr_8k_native", "asr_multilang", "asr_nonnative", "asr_read", "asr_speech", "command_slots")


@dataclass(frozen=True, slots=True)
class Pause:
    """One pause of at least 0.2 s."""

    # The id of the recording.
    recording: str
    # Its start, in seconds of the recording.
    at_s: float
    # The speaker. If a corpus does not tell its speakers apart, all of them have one name here.
    speaker: str
    # The corpus of the recording.
    corpus: str
    # The manifest's kind of recording.
    kind: str
    # ISO 639-1.
    language: str
    # True if the pause was inserted into the recording.
    mixed: bool
    # Length of the pause in seconds; None if it is the end of the turn.
    length_s: float | None
    # Probability, by the turn detector, that the turn is complete, after 0.2 s of the pause.
    complete: float
    # The same probability after 0.6 s; None if the pause is shorter.
    complete_later: float | None
    # The last characters of Whisper's transcript of the turn, up to 0.2 s into the pause.
    text: str
    # Number of words in the whole transcript.
    num_words: int


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording of one speaker, or of a speaker's turn in a meeting."""

    # Its name.
    id: str
    # The speaker, named as in `Pause`.
    speaker: str
    # Its corpus.
    corpus: str
    # The manifest's kind of recording.
    kind: str
    # ISO 639-1.
    language: str
    # float32, mono, 16 kHz.
    pcm: Pcm
    # True if its speaker has finished at its end.
    whole: bool
    # Bounds of the inserted pause, in samples; None if the recording's own pauses count.
    inserted: tuple[int, int] | None = None


def speaker_of(row: dict[str, Any]) -> str:
    """Return the speaker of a manifest's row. All speakers of a corpus that does not tell them apart have one name."""
    corpus, language = row.get("corpus", ""), row.get("language", "")
    if corpus == "FLEURS":
        return f"fleurs-{language}"
    if corpus == "Common Voice ja":
        return "common-voice-ja"
    return "barista" if corpus == "Picovoice barista" else str(row["speaker"])


def is_whole(row: dict[str, Any]) -> bool:
    """Return whether the recording ends with a complete sentence of its speaker."""
    text = (row.get("text") or "").rstrip(" \"'”)")
    return row.get("corpus") in WHOLE_SENTENCES or text.endswith(ENDS_SENTENCE)


def noise_like(pcm: Pcm, num_samples: int, seed: str) -> Pcm:
    """Return noise with the spectrum and level of the quietest 60 ms of the audio.

    Its level is at least NOISE_BELOW_DB below that of the loud parts, because a clip that is cut close to its words has
    no quiet part.
    """
    size = SAMPLE_RATE_HZ * 60 // 1000
    inner = pcm[800:-800] if len(pcm) > SAMPLE_RATE_HZ else pcm
    pieces = inner[: len(inner) // size * size].reshape(-1, size)
    powers = (pieces**2).mean(1)
    quietest = pieces[int(powers.argmin())]
    shape_at = np.abs(np.fft.rfft(quietest * np.hanning(size)))
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big"))
    white = np.fft.rfft(rng.normal(0, 1, num_samples))
    noise = np.fft.irfft(
        white * np.interp(np.linspace(0, 1, len(white)), np.linspace(0, 1, len(shape_at)), shape_at), num_samples
    )
    level = min(float(powers.min()), float(np.percentile(powers, 90)) * 10 ** (-NOISE_BELOW_DB / 10))
    return (noise * math.sqrt(level + 1e-12) / (math.sqrt(float(np.mean(noise**2))) + 1e-12)).astype(np.float32)


def deepest_gap(pcm: Pcm) -> int | None:
    """Return the middle of the longest quiet stretch of at least 60 ms, in samples; None if there is no such stretch.

    Only the middle three fifths of the audio are searched. Stretches of 0.2 s and more are real pauses, and are not
    used.
    """
    size = SAMPLE_RATE_HZ // 100
    level = frame_levels_db(pcm)
    loud = np.percentile(level, 90)
    best, run = (0, 0), 0
    for i in range(len(level) // 5, len(level) * 4 // 5):
        run = run + 1 if level[i] < loud - 20 else 0
        if not run or (i + 1 < len(level) and level[i + 1] < loud - 20):
            continue
        if best[0] < run < 20:
            best = (run, i)
    return (best[1] * size - best[0] * size // 2) if best[0] >= 6 else None


def with_pause(recording: Recording) -> Recording | None:
    """Return the recording with a pause in its deepest gap. The recording's id decides its length, 0.3 to 3 s."""
    at = deepest_gap(recording.pcm)
    if at is None:
        return None
    share = int.from_bytes(hashlib.sha256(recording.id.encode()).digest()[4:8], "big") / 2**32
    length = int(0.3 * 10**share * SAMPLE_RATE_HZ)
    noise = noise_like(recording.pcm, length, recording.id + "+pause")
    pcm = np.concatenate((recording.pcm[:at], noise, recording.pcm[at:]))
    return replace(recording, id=recording.id + "+pause", pcm=pcm, inserted=(at, at + length))


def own_turns(row: dict[str, Any], pcm: Pcm) -> Iterator[Recording]:
    """Return the stretches of a meeting in which only one speaker has the floor, and nobody else speaks."""
    segments = sorted((s[0], s[1], s[2]) for s in row["rttm"])
    runs: list[list[Any]] = []
    for start, end, speaker in segments:
        if runs and runs[-1][2] == speaker:
            runs[-1][1] = max(end, runs[-1][1])
        else:
            runs.append([start, end, speaker])
    for i, (start, end, speaker) in enumerate(runs):
        heard_before = max((e for _, e, _ in runs[:i]), default=0.0)
        next_at = runs[i + 1][0] if i + 1 < len(runs) else None
        begin = max(start - 0.1, heard_before)
        stop = end if next_at is None else min(end + 0.1, next_at)
        if stop - begin < 1.0:
            continue
        whole = next_at is not None and next_at >= end
        part = pcm[int(begin * SAMPLE_RATE_HZ) : int(stop * SAMPLE_RATE_HZ)]
        yield Recording(f"{row['id']}-{begin:.1f}", f"ami-{speaker}", "AMI", row["kind"], "en", part, whole)


def recordings(data: Path) -> Iterator[Recording]:
    """Return the recordings, each of one speaker: first the real ones, then those with an inserted pause."""
    rows = [row for row in rows_of(data) if row["kind"] in KINDS]

    def one(row: dict[str, Any]) -> Recording:
        pcm = decode_all(str(data / row["path"]))
        return Recording(
            row["id"], speaker_of(row), row.get("corpus", ""), row["kind"], row["language"], pcm, is_whole(row)
        )

    for row in rows:
        if row["kind"] == "conversation_rttm":
            yield from own_turns(row, decode_all(str(data / row["path"])))
        else:
            yield one(row)
    for row in rows:
        if row["kind"] in MIXED_KINDS and row["seconds"] >= 2 and (mixed := with_pause(one(row))):
            yield mixed


class Listener:
    """The server's own models, each with a lane that has one thread. `detector`: the value of `--turn-detector`."""

    def __init__(self, detector: str = "") -> None:
        settings = load_settings()
        store, options = store_of(settings.models), LaneModelOptions()
        settings = replace(settings, models=replace(settings.models, turn_detector=detector))

        def folder(name: str) -> Path:
            return store.require(MODELS[name])

        self.vad = SileroDetector(folder("silero-vad-v6"), "silero-vad-v6", options)
        self.judges = load(settings, store, roles=("turn",))
        assert self.judges.turn_detector
        self.turn_detector = self.judges.turn_detector
        self.transcriber = WhisperTranscriber(folder("whisper-base"), "whisper-base", options)
        self.decode_s: list[float] = []

    def close(self) -> None:
        """Close the lanes of the models."""
        self.judges.close()
        for lane in (self.vad.lane, self.transcriber.lane):
            lane.close()

    async def pauses(self, recording: Recording) -> list[Pause]:
        """Return the pauses of one recording, in order."""
        tail = noise_like(recording.pcm, int(TAIL_S * SAMPLE_RATE_HZ), recording.id)
        pcm = np.concatenate((recording.pcm, tail))
        probabilities = await self.vad.open().feed(pcm)
        segmenter = Segmenter(self.transcriber.profile, VAD, FRAME_SAMPLES)
        found: list[Pause] = []
        before, last_text, window_id = "", "", 0
        begun: int | None = None
        judged = again = False
        pause: Pause | None = None
        for i, probability in enumerate(probabilities):
            segmenter.feed(pcm[i * FRAME_SAMPLES : (i + 1) * FRAME_SAMPLES], [probability])
            quiet, window = segmenter.quiet_since, segmenter.window
            if quiet != begun:
                if pause is not None and begun is not None and quiet is None:
                    found.append(replace(pause, length_s=round((segmenter.now - FRAME_SAMPLES - begun) / 16000, 3)))
                begun, judged, again, pause = quiet, False, False, None
            if begun is None or window is None:
                continue
            silence_s = (segmenter.now - begun) / SAMPLE_RATE_HZ
            if silence_s >= JUDGE_AFTER_S and not judged:
                judged = True
                if recording.inserted and not recording.inserted[0] - 1600 <= begun <= recording.inserted[1]:
                    continue
                if window.id != window_id:
                    before, window_id = f"{before} {last_text}".strip(), window.id
                complete, last_text = await self.judged(window.pcm)
                text = f"{before} {last_text}".strip()
                pause = Pause(
                    recording.id,
                    round(begun / SAMPLE_RATE_HZ, 3),
                    recording.speaker,
                    recording.corpus,
                    recording.kind,
                    recording.language,
                    recording.inserted is not None,
                    None,
                    round(complete, 4),
                    None,
                    text[-MAX_CHARS:],
                    len(text.split()),
                )
            if silence_s >= JUDGE_AGAIN_S and not again and pause is not None:
                again = True
                later = await self.turn_detector.complete(window.pcm)
                pause = replace(pause, complete_later=round(later, 4))
        # A pause that lasts until the recording ends is the end of the turn.
        if pause is not None and recording.whole and not recording.inserted:
            found.append(pause)
        return found

    async def judged(self, pcm: Pcm) -> tuple[float, str]:
        """Return the probability that a turn is complete, by its sound and by detectors that read, and its transcript.

        `pcm`: 16 kHz, with the pause. The transcript is empty if there is no speech.
        """
        stream, complete = self.turn_detector.open(), 0.5
        # Detectors that read do not judge before the words are known.
        with suppress(ModelError):
            complete = await stream.complete(0, pcm)
        text = await self._text(pcm)
        read = await stream.read(text)
        return complete if read is None else read, text

    async def _text(self, pcm: Pcm) -> str:
        began = time.monotonic()
        hypothesis = await self.transcriber.decode(Window(pcm, final=True))
        self.decode_s.append(time.monotonic() - began)
        return "".join(p.text for p in hypothesis.pieces).strip() if hypothesis.is_speech else ""


def write(path: Path, seen: Sequence[str], found: Sequence[Pause], decode_s: Sequence[float]) -> None:
    """Write the rows to the file, one per line."""
    rows = ",\n".join(json.dumps(asdict(p), ensure_ascii=False) for p in found)
    median = round(float(np.median(decode_s)), 3) if decode_s else None
    head = f'"decode_s": {json.dumps(median)},\n"recordings": {json.dumps(list(seen))}'
    path.write_text(f'{{{head},\n"pauses": [\n{rows}\n]}}\n', encoding="utf-8")


def read(path: Path = PAUSES) -> list[Pause]:
    """Return the pauses of the file."""
    return [Pause(**row) for row in json.loads(path.read_text(encoding="utf-8"))["pauses"]]


async def find(data: Path, path: Path, seen: list[str], found: list[Pause], detector: str = "") -> None:
    """Find the pauses of recordings that the file does not have yet, and add them to it."""
    listener = Listener(detector)
    try:
        for recording in recordings(data):
            if recording.id in seen:
                continue
            found += await listener.pauses(recording)
            seen.append(recording.id)
            if len(seen) % 10 == 0:
                write(path, seen, found, listener.decode_s)
                print(len(seen), len(found), flush=True)
    finally:
        listener.close()
    write(path, seen, found, listener.decode_s)


def main() -> None:
    parser = argparse.ArgumentParser(description="Find the pauses of recordings, as the server sees them.")
    parser.add_argument("data", type=Path, help="folder with a manifest.jsonl")
    parser.add_argument("--out", type=Path, default=PAUSES)
    parser.add_argument("--turn-detector", default="", help="as in antiphon serve; needs --out")
    args = parser.parse_args()
    if args.turn_detector and args.out == PAUSES:
        parser.error("--turn-detector needs --out, because the rows of two detectors cannot be mixed")
    there = args.out.exists()
    seen = json.loads(args.out.read_text(encoding="utf-8"))["recordings"] if there else []
    asyncio.run(find(args.data, args.out, seen, read(args.out) if there else [], args.turn_detector))


if __name__ == "__main__":
    main()
