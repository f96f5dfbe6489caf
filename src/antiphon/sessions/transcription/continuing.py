"""Takes the state of a transcription session, and continues a session from such a state. `state.py` has the values."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import VadStream, VoiceActivityDetector
from antiphon.events.transcription import TranscriptionEvent
from antiphon.sessions.transcription.decoding import Decoding
from antiphon.sessions.transcription.microphone import MUTED_S
from antiphon.sessions.transcription.state import (
    ContinuedTranscription,
    Ended,
    EndedWindow,
    SentWord,
    TranscriptionState,
    TurnPart,
    unreported,
)
from antiphon.turns.segmenter import Segmenter, SegmenterEvent
from antiphon.turns.voices.live_speakers import LiveSpeakers
from antiphon.turns.windows import SpeechWindow, TurnEnded, WindowEnded, own_start

# Samples of audio, 0.1 s, that a session which continues another one need not wait for: the other session may have got
# them from its resampler at a commit.
MAX_LOST = SAMPLE_RATE_HZ // 10
# What listening has found and not reported or passed on yet.
Step = SegmenterEvent | TranscriptionEvent


class Continuing:
    """The state of one session, and the state of another session from which it continues. Its listening task uses it.

    `model` is the id of the transcriber. `labels` are the voices that turns are labelled with. `steps` are what
    listening has found and not reported or passed on yet. `keeps_parts`: `take_parts` is called regularly. While the
    session `is_behind`, its state is that of `continued`: the client sends audio again that the other session has
    divided into turns. The segmenter only records this audio.
    """

    def __init__(
        self,
        model: str,
        segmenter: Segmenter,
        decoding: Decoding,
        labels: LiveSpeakers | None,
        steps: Iterable[Step],
        continued: ContinuedTranscription | None,
        detector: VoiceActivityDetector,
        keeps_parts: bool,
    ) -> None:
        self._model = model
        self._segmenter = segmenter
        self._decoding = decoding
        self._labels = labels
        self._steps = steps
        self._continued = continued
        self._frame_samples = detector.frame_samples
        if keeps_parts:
            decoding.transcripts.parts = []

    @property
    def is_behind(self) -> bool:
        """Whether the session has not restored the other session's state yet."""
        return self._continued is not None

    @property
    def num_missing(self) -> int:
        """Samples of audio that the session lacks before it can restore the state."""
        return max(0, self._continued.state.segmenter.now - self._segmenter.now) if self._continued else 0

    @property
    def state(self) -> TranscriptionState:
        """The state from which another session can continue at this moment."""
        if self._continued:
            return self._continued.state
        segmenter, decoding, steps = self._segmenter.state(), self._decoding, list(self._steps)
        coming = [step for step in steps if isinstance(step, WindowEnded | TurnEnded)]
        ended = tuple(_ended(step) for step in [*decoding.unfinished, *coming])
        window, sent = decoding.transcripts.sent
        starts = [e.window.start for e in ended if e.window]
        starts.append(self._segmenter.next_turn_from if segmenter.window_start is None else segmenter.window_start)
        events = unreported([*decoding.to_emit, *steps])
        settled = max(0, min(starts))
        unread, num_labels = decoding.transcripts.unread, self._labels.num_labels if self._labels else 0
        until = decoding.partial_at[1] if sent else 0
        return TranscriptionState(
            self._model, settled, segmenter, ended, events, unread, window, sent, num_labels, until
        )

    @property
    def sent(self) -> tuple[int, tuple[SentWord, ...], int]:
        """The fields `window`, `sent` and `sent_until` of the state."""
        if self._continued:
            return self._continued.state.window, self._continued.state.sent, self._continued.state.sent_until
        return *self._decoding.transcripts.sent, self._decoding.partial_at[1]

    @property
    def emits_more(self) -> bool:
        """Whether another event follows the one that is emitted, without waiting for audio or for a decode."""
        decoding = self._decoding
        # A transcript whose last window was finished follows at once.
        is_read = isinstance(next(iter(decoding.unfinished), None), TurnEnded)
        return is_read or bool(decoding.to_emit) or any(not isinstance(s, WindowEnded | TurnEnded) for s in self._steps)

    def take_parts(self) -> list[TurnPart]:
        """Return what finished windows have added to turns since the last call."""
        parts, self._decoding.transcripts.parts = self._decoding.transcripts.parts or [], []
        return parts

    @property
    def patience_s(self) -> float:
        """Seconds without audio after which the state is restored although audio before it is missing."""
        return 0.0 if self.num_missing <= MAX_LOST else MUTED_S

    async def hear_again(self, pcm: Pcm, vad: VadStream) -> Pcm:
        """Record audio that the other session has divided, and adapt the VAD to it. Returns the audio after that."""
        again = pcm[: self.num_missing]
        if self._continued and self._segmenter.now == self._continued.from_sample:
            # The frames begin at the same samples as in the other session.
            await vad.feed(np.zeros(self._continued.from_sample % self._frame_samples, np.float32))
        for start in range(0, len(again), SAMPLE_RATE_HZ):
            piece = again[start : start + SAMPLE_RATE_HZ]
            self._segmenter.hear_again(piece, len(await vad.feed(piece)))
        return pcm[len(again) :]

    def restore(self) -> tuple[list[Step], dict[int, int]]:
        """Restore the other session's state. Audio that is still missing counts as silence.

        Returns what has to be reported and passed on next, and the start, in milliseconds of the session's audio, of
        each turn without a transcript.
        """
        assert self._continued
        continued, self._continued = self._continued, None
        state, segmenter = continued.state, self._segmenter
        segmenter.hear_again(np.zeros(max(0, state.segmenter.now - segmenter.now), np.float32), 0)
        segmenter.restore(state.segmenter)
        if self._labels:
            self._labels.num_labels = state.num_labels
        self._decoding.transcripts.restore(continued.valid_parts, state.window, state.sent)
        if state.sent:
            self._decoding.partial_at = state.window, state.sent_until
        steps: list[Step] = [each.event for each in state.unreported]
        return [*steps, *self._ended_in(state)], _unread_from_ms(state)

    def _ended_in(self, state: TranscriptionState) -> list[WindowEnded | TurnEnded]:
        """Return the ended windows and turns of a state, in order, with the recorded audio."""
        found: list[WindowEnded | TurnEnded] = []
        for ended in state.ended:
            if kept := ended.window:
                pcm = self._segmenter.heard(kept.start, kept.end)
                window = SpeechWindow(kept.id, kept.start, None, kept.spans, pcm, kept.quiet_since)
                found.append(WindowEnded(window, kept.speech_end))
            elif ended.turn:
                found.append(ended.turn)
        return found


def _ended(step: WindowEnded | TurnEnded) -> Ended:
    if isinstance(step, TurnEnded):
        return Ended(turn=step)
    window = step.window
    start = own_start(window.start, window.after, window.spans)
    return Ended(EndedWindow(window.id, start, window.end, window.spans, window.quiet_since, step.speech_end))


def _unread_from_ms(state: TranscriptionState) -> dict[int, int]:
    spans = [span for ended in state.ended if ended.window for span in ended.window.spans]
    found = {s.turn: s.start * 1000 // SAMPLE_RATE_HZ for s in reversed([*spans, *state.segmenter.spans])}
    return found | {e.turn.turn: found.get(e.turn.turn, 0) for e in state.ended if e.turn}
