"""`python -m bench.denoising`: what RNNoise before the speech detector, before the transcriber or before both would do.

    pip install --no-deps pyrnnoise
    python -m bench.denoising [--data DIR] [--clips N]

Turns are found as in a live session, and each window's final is decoded, in the process and as fast as it goes. "half"
is sound of which half was denoised, so that noise is lowered by 6 dB at most. Clips with noise are made by the data's
tools/evalmix.py, which needs ffmpeg.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import importlib.metadata
import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import soxr
from bench import words as wer
from bench.common import table
from bench.hearing.clips import NOISY, Clip, loaded, made, read_manifest, spread

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import Window
from antiphon.events.transcription import ServerVad, SpeechStarted
from antiphon.loading.loaded import LoadedModels
from antiphon.loading.loader import load, store_of
from antiphon.loading.selection import TRANSCRIPTION_ROLES
from antiphon.settings import load as load_settings
from antiphon.turns.segmenter import Segmenter, WindowEnded

RATE_HZ, FRAME = 48_000, 480
# By so many samples RNNoise's sound comes later than what it is given.
DELAY = 960
CHUNK = SAMPLE_RATE_HZ // 10


class RnNoise:
    """The library that the package pyrnnoise ships. Its Python code, which wants a plotting library, is not used."""

    def __init__(self) -> None:
        files = importlib.metadata.files("pyrnnoise") or ()
        library = next(f for f in files if f.name.startswith("librnnoise"))
        self._library = ctypes.CDLL(str(library.locate()))
        self._library.rnnoise_create.restype = ctypes.c_void_p
        self._library.rnnoise_create.argtypes = (ctypes.c_void_p,)
        self._library.rnnoise_destroy.argtypes = (ctypes.c_void_p,)
        self._library.rnnoise_process_frame.restype = ctypes.c_float
        self._library.rnnoise_process_frame.argtypes = (ctypes.c_void_p,) * 3

    def denoised(self, pcm: Pcm) -> Pcm:
        """Return the sound without its noise, as long as `pcm` and in time with it. float32, mono, 16 kHz."""
        given = soxr.resample(pcm, SAMPLE_RATE_HZ, RATE_HZ) * 32768
        given = np.pad(given, (0, DELAY + FRAME - len(given) % FRAME)).astype(np.float32)
        made, state = np.zeros_like(given), self._library.rnnoise_create(None)
        for start in range(0, len(given) - FRAME + 1, FRAME):
            self._library.rnnoise_process_frame(state, made[start:].ctypes.data, given[start:].ctypes.data)
        self._library.rnnoise_destroy(state)
        out = soxr.resample(made[DELAY:] / 32768, RATE_HZ, SAMPLE_RATE_HZ)
        return np.pad(out, (0, max(0, len(pcm) - len(out))))[: len(pcm)].astype(np.float32)


async def heard(models: LoadedModels, detected: Pcm, decoded: Pcm) -> tuple[int, str]:
    """The number of turns found in `detected`, and the text of their windows in `decoded`."""
    transcriber, detector = models.required_transcriber, models.required_vad
    stream, turns, windows = detector.open(), 0, []
    segmenter = Segmenter(transcriber.profile, ServerVad(silence_duration_ms=500), detector.frame_samples)
    silence = np.zeros(SAMPLE_RATE_HZ * 3 // 2, np.float32)
    detected, decoded = np.concatenate((detected, silence)), np.concatenate((decoded, silence))
    for start in range(0, len(detected), CHUNK):
        probabilities = await stream.feed(detected[start : start + CHUNK])
        for step in segmenter.feed(decoded[start : start + CHUNK], probabilities, None):
            turns += isinstance(step, SpeechStarted)
            if isinstance(step, WindowEnded):
                windows.append(step.window.pcm)
    finals = [await transcriber.open().decode(Window(pcm, language="en", final=True)) for pcm in windows]
    return turns, " ".join("".join(p.text for p in final.pieces) for final in finals if final.is_speech)


async def compare(models: LoadedModels, levels: dict[str, list[Clip]]) -> None:
    denoiser, rows = RnNoise(), []
    for level, clips in levels.items():
        errors, turns, num_words = defaultdict[str, int](int), defaultdict[str, int](int), 0
        for clip in clips:
            clean = denoiser.denoised(clip.pcm)
            half = (clip.pcm + clean) / 2
            ways = {"none": (clip.pcm, clip.pcm), "detector": (clean, clip.pcm), "both": (clean, clean)}
            for way, (detected, decoded) in (ways | {"half": (half, half)}).items():
                found, text = await heard(models, detected, decoded)
                wrong, spoken = wer.score(clip.text, text, "en")
                errors[way] += wrong if clip.text else 0
                turns[way] += found
            num_words += spoken if clip.text else 0
        rows += [(level, way, num_words and 100 * errors[way] / num_words, turns[way], len(clips)) for way in turns]
    table("RNNoise: word errors in %, and turns", ("sound", "before", "errors", "turns", "clips"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.denoising", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(__file__).parent.parent / "tests" / "data")
    parser.add_argument("--clips", type=int, default=16)
    args = parser.parse_args()
    clips = read_manifest(args.data)
    read = [c for c in clips if c.kind == "asr_read" and c.language == "en" and c.text]
    levels = {"clean": loaded(spread(read, args.clips))}
    for clip in made(args.data, NOISY, args.clips):
        levels.setdefault(clip.id.rsplit("-", 1)[1], []).append(clip)
    levels["no speech"] = loaded(c for c in clips if c.kind in ("noise", "music"))
    settings = load_settings({}, os.environ)
    models = load(settings, store_of(settings.models), roles=TRANSCRIPTION_ROLES)
    try:
        asyncio.run(compare(models, levels))
    finally:
        models.close()


if __name__ == "__main__":
    main()
