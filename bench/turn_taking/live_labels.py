"""How often the label of a live turn is right, of dialogues whose speakers are known (`antiphon bench speakers`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
from bench.turn_taking.clustering import best_names
from bench.turn_taking.dialogues import Dialogue
from bench.turn_taking.speakers import interval

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.contracts import Hypothesis, TranscriberProfile, Window
from antiphon.events.transcription import (
    AppendAudio,
    ServerVad,
    TranscriptDone,
    TranscriptionConfig,
    TranscriptionEvent,
    TurnCommitted,
)
from antiphon.loading.loaded import LoadedModels
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.session import TranscriptionSession

# Samples of a client's message, 100 ms.
PIECE = SAMPLE_RATE_HZ // 10
# A turn with less speech of one person than this, in seconds, is counted apart.
LONG_S = 1.0


class _Deaf:
    """A transcriber that hears no words, since labels do not depend on them."""

    profile = TranscriberProfile(
        *("deaf", ("en",), 0.3, 0.2, 0.9, 0.9, 1, 0.3, 0, 0.5, 1.5, 0.8, 9.0, 0.3, 22.0, 0, 224, 180)
    )

    def open(self) -> _Deaf:
        return self

    def close(self) -> None:
        pass

    def busy(self) -> bool:
        return False

    def overdue(self) -> bool:
        return False

    def replace(self, window: Window) -> bool:
        return False

    async def decode(self, window: Window) -> Hypothesis:
        await anyio.lowlevel.checkpoint()
        return Hypothesis((), "en", 1.0, True, 0, 0, ())


@dataclass(frozen=True, slots=True)
class Labelled:
    """One turn of the session: who says most of it (`user`), for how long, and its label. `wrong` is set at the end."""

    user: str
    speech_s: float
    label: str
    wrong: bool = True


async def turns_of(models: LoadedModels, model: Any, recording: Dialogue) -> tuple[list[Labelled], int]:
    """Return the turns that a session finds in a dialogue, and how many labels differ from one sent before."""
    spans: dict[int, tuple[float, float]] = {}
    labels: dict[int, str] = {}
    num_changed = 0

    async def emit(event: TranscriptionEvent) -> None:
        nonlocal num_changed
        if isinstance(event, TurnCommitted):
            spans[event.turn] = event.start_ms / 1000, (event.speech_end_ms or event.end_ms) / 1000
        elif isinstance(event, TranscriptDone):
            num_changed += labels.setdefault(event.turn, event.speaker_label) != event.speaker_label

    inbox = Inbox(3600)
    config = TranscriptionConfig(vad=ServerVad(), speaker_labels=True)
    transcriber: Any = _Deaf()
    session = TranscriptionSession(config, transcriber, models.required_vad, inbox, emit, speaker_model=model)
    async with anyio.create_task_group() as group:
        group.start_soon(session.run)
        for start in range(0, len(recording.pcm), PIECE):
            await inbox.put(AppendAudio(recording.pcm[start : start + PIECE]))
            while not inbox.is_worked_off:
                await anyio.lowlevel.checkpoint()
        inbox.close()
    out = []
    for turn, (start_s, end_s) in spans.items():
        seconds: dict[str, float] = {}
        for said in recording.turns:
            shared_s = min(said.end_s, end_s) - max(said.start_s, start_s)
            if shared_s > 0:
                seconds[said.speaker] = seconds.get(said.speaker, 0.0) + shared_s
        if seconds:
            user = max(seconds, key=lambda speaker: seconds[speaker])
            out.append(Labelled(user, seconds[user], labels.get(turn, "")))
    return out, num_changed


def judged(turns: Sequence[Labelled]) -> list[Labelled]:
    """Return the turns with `wrong`, by the best assignment of labels to voices. A turn without a label is wrong."""
    names = best_names([(turn.label, turn.user) for turn in turns if turn.label])
    return [Labelled(t.user, t.speech_s, t.label, not t.label or names.get(t.label) != t.user) for t in turns]


async def live_figures(models: LoadedModels, model: Any, recordings: Sequence[Dialogue]) -> dict[str, Any]:
    """Return the shares of right labels by number of voices and by condition, changed labels, and the cost.

    `model`: a speaker encoder that counts the seconds of CPU of its calls.
    """
    found: dict[Dialogue, list[Labelled]] = {}
    num_changed = 0
    for recording in recordings:
        turns, changed = await turns_of(models, model, recording)
        found[recording] = judged(turns)
        num_changed += changed
        share = np.mean([turn.wrong for turn in found[recording] if turn.speech_s >= LONG_S] or [0.0])
        print(f"{recording.name}: {len(found[recording])} turns, {share:.1%} wrong", file=sys.stderr, flush=True)
    groups: dict[str, list[Dialogue]] = {"all": list(recordings)}
    for recording in recordings:
        groups.setdefault(f"{len(recording.speakers)} voices", []).append(recording)
        groups.setdefault(recording.condition, []).append(recording)
    seconds = sum(len(recording.pcm) for recording in recordings) / SAMPLE_RATE_HZ
    return {
        "rows": {name: _row([t for member in members for t in found[member]]) for name, members in groups.items()},
        "labels_changed": num_changed,
        "audio_s": round(seconds),
        "core_share_voices": round(100 * model.seconds / seconds, 2),
    }


def _row(turns: Sequence[Labelled]) -> dict[str, Any]:
    long = [turn for turn in turns if turn.speech_s >= LONG_S]
    right = 100 * float(np.mean([not turn.wrong for turn in long])) if long else 0.0
    return {
        "turns": len(long),
        "right": round(right, 1),
        "interval": interval(long, lambda turn: not turn.wrong),
        "without_label": round(100 * float(np.mean([not turn.label for turn in long])), 1) if long else 0.0,
        "shorter_turns": len(turns) - len(long),
    }
