"""The audio of a conversation's turns, for a conversation model that hears it. Pure: no clocks, no tasks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import AudioPart, ImagePart, SoundTrack
from antiphon.events.conversation import Item
from antiphon.events.transcription import (
    SpeechStarted,
    TranscriptDone,
    TranscriptFailed,
    TranscriptionEvent,
    TurnCleared,
    TurnCommitted,
)
from antiphon.sessions.conversation.history import IMAGE_GONE, ConversationHistory

# The last MAX_TURN_S seconds of a turn are kept, and TAIL_MS milliseconds after its last speech.
MAX_TURN_S, TAIL_MS = 120, 100
# A turn that continues is prefilled again after this time: louder speech changes the results of earlier windows.
GROWTH_MS = 1000
# Limits of a conversation's audio, in seconds, and of its images. If there is more than the first number, the oldest
# are dropped until the second number is left. Their text stays.
MAX_AUDIO_S, KEPT_AUDIO_S = 600, 300
MAX_IMAGES, KEPT_IMAGES = 64, 32


@dataclass(slots=True)
class _Turn:
    """One turn of the user. `began_ms` is the onset of its speech. `part` is its audio up to the pause that began at
    `speech_end_ms`. `source` is the `AudioPart.turn` of its parts. `growing_ms` is the length of the last part that
    `growing_turn` has returned.
    """

    began_ms: int
    speech_end_ms: int = -1
    part: AudioPart | None = None
    source: SoundTrack = field(default_factory=SoundTrack)
    growing_ms: int = 0


class TurnAudio:
    """Keeps the last 120 s of the user's audio, as int16, and cuts turns out of it.

    Pass all audio to `append_audio` before the transcription session gets it, and all events of that session to
    `follow`. All times are milliseconds from the start of the session's audio. `paused_turn` and `ended_turn` return
    the same `AudioPart` object for the same pause. By this object, a preemptive response that began at the pause is
    recognized as the requested response.

    `window_ms`: see `ConversationProfile.audio_window_ms`.
    """

    def __init__(self, window_ms: int = 0) -> None:
        self._window_ms = window_ms
        self._held: deque[npt.NDArray[np.int16]] = deque()
        # The number of samples received, and the number of samples kept.
        self._num_received = self._num_held = 0
        # The turns without a transcript, by number.
        self._turns: dict[int, _Turn] = {}
        # The end of the previous turn in milliseconds, the audio since then as a turn, and the turn whose speech began
        # last.
        self._ended_ms = 0
        self._since = _Turn(0)
        self._speaking: _Turn | None = None

    @property
    def open_turns(self) -> set[int]:
        """Numbers of the turns whose transcript has neither arrived nor failed. Their bounds are kept until then."""
        return set(self._turns)

    async def append_audio(self, pcm: Pcm) -> None:
        """Keep audio: float32 [num_samples] in [-1, 1], mono, 16 kHz. It is copied and clipped. Never waits: this is a
        coroutine only because the `tap` of a transcription session has to be one.
        """
        self._held.append(np.rint(np.clip(pcm, -1, 1) * 32767).astype(np.int16))
        self._num_received += len(pcm)
        self._num_held += len(pcm)
        while self._num_held - len(self._held[0]) >= MAX_TURN_S * SAMPLE_RATE_HZ:
            self._num_held -= len(self._held.popleft())

    def follow(self, event: TranscriptionEvent) -> None:
        """Learn from an event of the transcription session where turns begin and end. A turn is forgotten after its
        transcript. The audio of a cleared turn is not part of the next turn.
        """
        match event:
            case SpeechStarted(turn, at_ms):
                self._turns[turn] = self._speaking = _Turn(at_ms)
            case TurnCommitted(turn, start_ms, end_ms):
                if turn not in self._turns and start_ms == self._ended_ms:
                    self._turns[turn] = self._since
                self._end_turn(end_ms)
            case TranscriptDone(turn) | TranscriptFailed(turn):
                self._turns.pop(turn, None)
            case TurnCleared():
                self._turns.clear()
                self._end_turn(self._num_received * 1000 // SAMPLE_RATE_HZ)

    def _end_turn(self, at_ms: int) -> None:
        self._ended_ms, self._since, self._speaking = at_ms, _Turn(at_ms), None

    def growing_turn(self, *, detected: bool) -> AudioPart | None:
        """Return the audio of the current turn so far, as a part that grows, if another window of `window_ms` is
        complete, or if GROWTH_MS have passed since the last part. Otherwise returns None, also before the first window,
        and for a turn of more than 120 s, whose beginning is no longer kept.

        `detected`: whether turns begin where the server found speech, and not where the previous turn ended.
        """
        turn = self._speaking if detected else self._since
        if turn is None or not self._window_ms:
            return None
        now_ms = self._num_received * 1000 // SAMPLE_RATE_HZ
        # If TAIL_MS of audio follow a window, its result does not depend on later audio, unless that is louder.
        length_ms = now_ms - turn.began_ms - TAIL_MS
        complete_ms = length_ms - length_ms % self._window_ms
        is_due = turn.growing_ms < complete_ms or turn.growing_ms + GROWTH_MS <= length_ms
        if length_ms < self._window_ms or not is_due or now_ms - turn.began_ms > MAX_TURN_S * 1000:
            return None
        turn.growing_ms = length_ms
        return AudioPart(self._cut(turn.began_ms, now_ms), turn.source, grows=True)

    def paused_turn(self, turn: int, speech_end_ms: int) -> AudioPart:
        """Return the audio of an open turn that is in a pause since `speech_end_ms`: from the onset of its speech to
        100 ms after `speech_end_ms`, as far as it is still kept. Calls with the same arguments return the same object.
        """
        return self._part(turn, self._ended_ms, speech_end_ms)

    def ended_turn(self, turn: TurnCommitted) -> AudioPart:
        """Return the audio of a turn that has ended: float32, 16 kHz, up to 100 ms after its last speech, and at most
        its last 120 s. If `paused_turn` was called for the same pause, returns the same object.
        """
        speech_end_ms = turn.end_ms if turn.speech_end_ms is None else turn.speech_end_ms
        return self._part(turn.turn, turn.start_ms, speech_end_ms)

    def _part(self, number: int, start_ms: int, speech_end_ms: int) -> AudioPart:
        turn = self._turns.setdefault(number, _Turn(start_ms))
        if turn.part is None or turn.speech_end_ms != speech_end_ms:
            pcm = self._cut(turn.began_ms, speech_end_ms + TAIL_MS)
            turn.part, turn.speech_end_ms = AudioPart(pcm, turn.source), speech_end_ms
        return turn.part

    def _cut(self, start_ms: int, end_ms: int) -> Pcm:
        start, end = (ms * SAMPLE_RATE_HZ // 1000 for ms in (start_ms, end_ms))
        at, parts = self._num_received - self._num_held, list[npt.NDArray[np.int16]]()
        for held in self._held:
            low, high = max(0, start - at), max(0, end - at)
            if low < len(held) and high:
                parts.append(held[low:high])
            at += len(held)
        whole = np.concatenate(parts) if parts else np.zeros(0, np.int16)
        return whole.astype(np.float32) / np.float32(32767)


def drop_old_media(history: ConversationHistory, added: Item) -> None:
    """Drop the media of the oldest items if a conversation keeps too much. Above 600 s of audio, audio is dropped until
    at most 300 s are left. Above 64 images, images are dropped until 32 are left. The transcript of the audio stays,
    and so does the text of an image, or a note that an image was shown. Changes the items in place. A no-op if `added`,
    the newest item, has no media.
    """
    if not any(p.image or p.media for p in added.parts):
        return
    media = [(p, p.media) for i in history.items for p in i.parts if p.media]
    audio = [(p, len(m.pcm) / SAMPLE_RATE_HZ) for p, m in media if isinstance(m, AudioPart)]
    images = [(p, 1) for p, m in media if isinstance(m, ImagePart)]
    dropped = False
    for parts, most, kept in ((audio, MAX_AUDIO_S, KEPT_AUDIO_S), (images, MAX_IMAGES, KEPT_IMAGES)):
        total = sum(size for _, size in parts)
        if total <= most:
            continue
        dropped = True
        for part, size in parts:
            if total <= kept:
                break
            part.media, total = None, total - size
            part.text = part.text or (IMAGE_GONE if part.kind == "input_image" else "")
    if dropped:
        history.measure_all()
