"""Who says what in files: words with the wrong speaker, the number of speakers, diarization errors, and the cost.

    antiphon bench speakers [--data DIR] [--sections mixed,ami,live,stereo] [--each 1] [--metrics-python PYTHON]
    antiphon bench speakers --data DIR --fit [--speaker-model campplus]

- `mixed`: dialogues of one to six voices (`bench/turn_taking/dialogues.py`), with voices of the half `test`.
- `ami`: excerpts of meetings, with their reference of who speaks when.
- `live`: the dialogues of `mixed`, each in a live session: whether the label at the end of each turn is right.
- `stereo`: the same dialogues of two voices with a channel for each, and each channel alone.

Files go through the same code as in the server, with the default transcriber. A word is wrong if its speaker, after the
best assignment of labels to voices, is none of those who speak in the word's middle. Intervals are 95 % intervals, by
resampling voices. The diarization error rate needs `--metrics-python`, a Python with pyannote.metrics (not a
dependency of antiphon). `--fit` prints the directions and the figures of several limits for the encoder's profile, for
voices of the half `fit`, without a transcriber.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np
from bench.common import machine, numbers, options, save, show, table
from bench.hearing.clips import rows_of, with_data
from bench.turn_taking.clustering import best_names, fit
from bench.turn_taking.dialogues import Dialogue, Turn, dialogues
from bench.turn_taking.live_labels import live_figures
from bench.turn_taking.speakers import MODEL, interval

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.channel_survey import ChannelPicker, ChannelSurvey
from antiphon.audio.containers import decode_all
from antiphon.contracts import FileOptions, TranscriptSegment
from antiphon.events.words import bare_word
from antiphon.loading.loaded import LoadedModels
from antiphon.loading.loader import load, store_of
from antiphon.sessions.transcription.file_channels import CHANNEL_PAUSE_S
from antiphon.sessions.transcription.file_speakers import FileVoices
from antiphon.sessions.transcription.file_speech import FILE_VAD, segments_by_words, transcribe_speech
from antiphon.settings import load as load_settings
from antiphon.turns.voices.speakers import SpeakerHints

SECTIONS = ("mixed", "ami", "live", "stereo")
# Turns from this length on are counted apart from shorter ones, in seconds.
LONG_S = 1.0
# A word farther than this from every turn, in seconds, is not counted, because no speaker said it.
NEAR_S = 0.3
# Level of the other side on each channel, relative to its own channel.
CROSSTALK_DB = -30.0
SLAB_SAMPLES = 30 * SAMPLE_RATE_HZ


@dataclass(frozen=True, slots=True)
class Scored:
    """One word: the voice that says it (`user`), the length of its turn, and whether its label is wrong."""

    user: str
    turn_s: float
    wrong: bool


@dataclass(frozen=True, slots=True)
class Heard:
    """What was found in a recording: its segments, and the seconds of CPU for the transcript and for the voices."""

    segments: list[TranscriptSegment]
    transcript_s: float
    voices_s: float


class _Timed:
    """A speaker encoder that counts the seconds of CPU of its calls."""

    def __init__(self, model: Any) -> None:
        self.model, self.profile, self.seconds = model, model.profile, 0.0

    async def embed(self, pcm: Pcm) -> Pcm:
        before = cpu_s()
        vector: Pcm = await self.model.embed(pcm)
        self.seconds += cpu_s() - before
        return vector


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def heard(models: LoadedModels, pcm: Pcm, *, by_voice: bool = True) -> Heard:
    """Transcribe a recording as the server does, with speakers by voice if `by_voice`."""

    async def slabs() -> AsyncIterator[Pcm]:
        for start in range(0, len(pcm), SLAB_SAMPLES):
            yield pcm[start : start + SLAB_SAMPLES]

    model = _Timed(models.speaker_model)
    voices = FileVoices(model, model.profile.clustering, SpeakerHints())
    listener = voices.hear if by_voice else None
    before = cpu_s()
    parts = transcribe_speech(
        models.required_transcriber, models.required_vad, slabs(), FileOptions(word_times=True), FILE_VAD, listener
    )
    pause_s = {} if by_voice else {"max_pause_s": CHANNEL_PAUSE_S}
    segments = [part async for part in segments_by_words(parts, **pause_s) if isinstance(part, TranscriptSegment)]
    transcript_s = cpu_s() - before - model.seconds
    if by_voice:
        before = cpu_s()
        segments = await voices.labelled(segments)
        model.seconds += cpu_s() - before
    return Heard(segments, transcript_s, model.seconds)


def scored(segments: Sequence[TranscriptSegment], turns: Sequence[Turn]) -> list[Scored]:
    """Return the words of a transcript that somebody says, and whether each has the right label."""
    said: list[tuple[str, list[Turn]]] = []
    for segment in segments:
        for word in segment.words:
            middle = (word.start_s + word.end_s) / 2
            away = [max(turn.start_s - middle, middle - turn.end_s, 0.0) for turn in turns]
            if min(away) <= NEAR_S:
                said.append((segment.speaker, [t for t, s in zip(turns, away, strict=True) if s == min(away)]))
    names = best_names([(label, around[0].speaker) for label, around in said if len(around) == 1])
    out = []
    for label, around in said:
        right = [turn for turn in around if turn.speaker == names.get(label)]
        turn = (right or around)[0]
        out.append(Scored(turn.speaker, turn.end_s - turn.start_s, not right))
    return out


def der(pairs: list[dict[str, Any]], python: Path | None) -> dict[str, float]:
    """Return the diarization error rate of recordings, in percent; empty without a Python that has the scorer."""
    if python is None:
        return {}
    script = Path(__file__).parent / "turn_taking" / "der.py"
    run = subprocess.run([python, script], input=json.dumps(pairs), capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(run.stdout)
    return found


def wrong(words: Sequence[Scored]) -> dict[str, Any]:
    """Return the share of words with the wrong speaker in percent, its interval, and the number of words."""
    if not words:
        return {"words": 0}
    share = 100 * float(np.mean([word.wrong for word in words]))
    return {"wrong": round(share, 1), "interval": interval(words, lambda w: w.wrong), "words": len(words)}


async def dialogue_figures(models: LoadedModels, recordings: Sequence[Dialogue], python: Path | None) -> dict[str, Any]:
    """Return the figures of recordings by number of voices and by condition, of all of them, and the cost."""
    words: dict[Dialogue, list[Scored]] = {}
    counts, pairs, seconds, transcript_s, voices_s = {}, {}, 0.0, 0.0, 0.0
    for recording in recordings:
        found = await heard(models, recording.pcm)
        words[recording] = scored(found.segments, recording.turns)
        counts[recording] = len({segment.speaker for segment in found.segments})
        pairs[recording] = {
            "reference": [(turn.start_s, turn.end_s, turn.speaker) for turn in recording.turns],
            "hypothesis": [(segment.start_s, segment.end_s, segment.speaker) for segment in found.segments],
        }
        seconds += len(recording.pcm) / SAMPLE_RATE_HZ
        transcript_s += found.transcript_s
        voices_s += found.voices_s
        share = np.mean([w.wrong for w in words[recording]] or [0.0])
        print(f"{recording.name}: {len(recording.speakers)} voices, {counts[recording]} found, {share:.1%} wrong",
              file=sys.stderr, flush=True)  # fmt: skip
    groups: dict[str, list[Dialogue]] = {"all": list(recordings)}
    for recording in recordings:
        groups.setdefault(f"{len(recording.speakers)} voices", []).append(recording)
        groups.setdefault(recording.condition, []).append(recording)
    rows = {}
    for group, members in groups.items():
        said = [word for member in members for word in words[member]]
        rows[group] = {
            "recordings": len(members),
            "turns_from_1_s": wrong([word for word in said if word.turn_s >= LONG_S]),
            "shorter_turns": wrong([word for word in said if word.turn_s < LONG_S]),
            "number_right": round(100 * float(np.mean([counts[m] == len(m.speakers) for m in members])), 1),
            **der([pairs[member] for member in members], python),
        }
    return {
        "rows": rows,
        "audio_s": round(seconds),
        "core_share_voices": round(100 * voices_s / seconds, 2),
        "core_share_transcript": round(100 * transcript_s / seconds, 2),
    }


def meetings(data: Path) -> list[Dialogue]:
    """Return the excerpts of meetings."""
    return [
        Dialogue(row["id"], "meeting", decode_all(str(data / row["path"])), tuple(Turn(*turn) for turn in row["rttm"]))
        for row in rows_of(data)
        if row["kind"] == "conversation_rttm"
    ]


def sides(recording: Dialogue) -> dict[str, Pcm]:
    """Return for each voice of a dialogue a recording of its turns alone."""
    out = {voice: np.zeros_like(recording.pcm) for voice in sorted(recording.speakers)}
    for turn in recording.turns:
        start, end = int(turn.start_s * SAMPLE_RATE_HZ), int(turn.end_s * SAMPLE_RATE_HZ)
        out[turn.speaker][start:end] = recording.pcm[start:end]
    return out


async def stereo_figures(models: LoadedModels, recordings: Sequence[Dialogue]) -> dict[str, Any]:
    """Return how many words of each side alone are also found, in order, with both sides as channels of one file.

    Each side also hears the other one, 30 dB softer. `others`: words that are not found on the side alone.
    """
    both = alone = others = 0
    for recording in recordings:
        clean = np.stack(list(sides(recording).values()))
        channels = (clean + 10 ** (CROSSTALK_DB / 20) * (clean.sum(axis=0) - clean)).astype(np.float32)
        survey = ChannelSurvey()
        survey.feed(channels, SAMPLE_RATE_HZ)
        facts = survey.facts()
        for number, side in enumerate(clean):
            picked = ChannelPicker(SAMPLE_RATE_HZ, number, facts.loud).feed(channels)
            reference, found = [
                [bare_word(word.text) for segment in one.segments for word in segment.words]
                for one in (await heard(models, side, by_voice=False), await heard(models, picked, by_voice=False))
            ]
            blocks = SequenceMatcher(None, reference, found, autojunk=False).get_matching_blocks()
            matched = sum(block.size for block in blocks)
            both, alone, others = both + matched, alone + len(reference), others + len(found) - matched
    shares = {"also_in_stereo": round(100 * both / alone, 1), "others": round(100 * others / alone, 1)}
    return {"words_alone": alone, **shares}


def main() -> None:
    parser = with_data(options("antiphon bench speakers", __doc__, SECTIONS))
    parser.add_argument("--each", type=int, default=1, help="dialogues of each size in each condition [%(default)s]")
    parser.add_argument("--sizes", type=numbers, default=[1, 2, 3, 4, 5, 6], help="numbers of voices, such as 2,4")
    parser.add_argument("--metrics-python", type=Path, help="a Python with pyannote.metrics")
    parser.add_argument("--speaker-model", default=MODEL, help="the speaker encoder [%(default)s]")
    parser.add_argument("--fit", action="store_true", help="print what the encoder's profile is made from")
    args: argparse.Namespace = parser.parse_args()
    settings = load_settings({"speaker_model": args.speaker_model}, os.environ)
    if args.fit:
        models = load(settings, store_of(settings.models), roles=("speaker",))
        asyncio.run(fit(models, args.data, args.each, args.sizes))
        models.close()
        return
    models = load(settings, store_of(settings.models), roles=("transcriber", "vad", "speaker"))
    started_s = time.monotonic()
    try:
        for section in args.sections.split(","):
            if section == "mixed":
                recordings = dialogues(args.data, "test", each=args.each, sizes=args.sizes)
                found = asyncio.run(dialogue_figures(models, recordings, args.metrics_python))
            elif section == "ami":
                found = asyncio.run(dialogue_figures(models, meetings(args.data), args.metrics_python))
            elif section == "live":
                recordings = dialogues(args.data, "test", each=args.each, sizes=args.sizes)
                found = asyncio.run(live_figures(models, _Timed(models.speaker_model), recordings))
            else:
                recordings = dialogues(args.data, "test", each=args.each, sizes=(2,))
                telephone = [r for r in recordings if r.condition == "telephone"]
                found = asyncio.run(stereo_figures(models, telephone))
            if section == "live":
                show("live", found["rows"])
            elif rows := found.get("rows"):
                head = ("recordings of", "n", "wrong, 1 s and longer", "shorter", "number right", "DER")
                table(section, head, [_row(name, row) for name, row in rows.items()])
            print({key: value for key, value in found.items() if key != "rows"})
            kind = "" if args.speaker_model == MODEL else f"-{args.speaker_model}"
            save(f"speakers{kind}", {"machine": machine(), section: found | {"load": round(os.getloadavg()[0], 1)}})
    finally:
        models.close()
    print(f"took {time.monotonic() - started_s:.0f} s; load {os.getloadavg()[0]:.1f}")


def _row(name: str, row: dict[str, Any]) -> tuple[Any, ...]:
    long, short = row["turns_from_1_s"], row["shorter_turns"]
    texts = [f"{part['wrong']} % {part['interval']}" if part["words"] else "" for part in (long, short)]
    return name, row["recordings"], *texts, f"{row['number_right']} %", row.get("der", "")


if __name__ == "__main__":
    main()
