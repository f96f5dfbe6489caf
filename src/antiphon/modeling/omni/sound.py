"""Log-mel spectrograms of sound, equal to those of the processors of Qwen2.5-Omni and Qwen3-Omni."""

from __future__ import annotations

import time
from hashlib import blake2b
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import WhisperFeatureExtractor

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.contracts import AudioPart, SoundTrack, SoundWindow
from antiphon.modeling.media_rows import AudioWindow
from antiphon.modeling.sound.log_mel import EDGE_FRAMES, HOP, SPAN, FinishedWindow, GrowingMel, MelTransform

# The frames of a turn are kept for this number of seconds after they were last asked for.
KEPT_S = 60.0
# The distance of the extractor's floor below the loudest frame: 8 decades, in units of 4 decades.
FLOOR = 2.0
# Shorter audio is padded with silence, because the encoder's convolutions would return no rows for it.
MIN_SAMPLES = SAMPLE_RATE_HZ // 10


class ClipSound:
    """The spectrogram of a clip in windows of the encoder, which are kept while the clip grows. Used in one thread.

    `windows`: the finished windows of a clip that grows, or all windows of another clip, in order.
    """

    def __init__(self, source: object, mel: GrowingMel, window_frames: int) -> None:
        """`source`: see AudioWindow. `mel`: the frames of the clip. `window_frames`: the number of them in a window."""
        self.mel, self.windows = mel, list[AudioWindow]()
        self._source, self._window_frames, self._num_frames = source, window_frames, 0
        # The finished windows at the beginning, and the floor of the frames in `windows`.
        self._finished: list[FinishedWindow] = []
        self._floor = 0.0

    def update(self, num_frames: int, *, grows: bool) -> None:
        """Find the windows again, after the frames of `mel` have changed. `num_frames`: the number of the clip's."""
        self._num_frames = num_frames
        floor, held, known = self.mel.floor, self.windows, self._finished
        count = (
            max(0, num_frames - EDGE_FRAMES) // self._window_frames if grows else -(-num_frames // self._window_frames)
        )
        self.windows, self._finished, before, self._floor = [], self.mel.finished[:], self._floor, floor
        for number in range(count):
            own = self._finished[number] if number < len(self._finished) else None
            if own and number < min(len(known), len(held)) and known[number] is own and own.is_same(before, floor):
                self.windows.append(held[number])
            else:
                digest = blake2b(self.frames(number).data, digest_size=16).digest()
                self.windows.append(AudioWindow(self._source, number, digest))

    def frames(self, number: int) -> Pcm:
        """Return the frames of a window, float32 [bins, frames]."""
        chunks, count = self.mel.chunks, min(self._window_frames, self._num_frames - number * self._window_frames)
        each = self._window_frames // chunks.shape[2]
        own = chunks[number * each :][:each]
        joined = own.swapaxes(0, 1).reshape(own.shape[1], -1)[:, :count]
        found: Pcm = np.maximum(joined, np.float32(self._floor))
        return found


class SoundFeatures:
    """Makes spectrograms, float32 [bins, frames of 10 ms], in any thread.

    `zero_padded`: compute the last frames as if silence followed the sound, as Qwen2.5-Omni's processor does. Otherwise
    the sound is mirrored at its end.
    """

    def __init__(self, folder: Path, *, zero_padded: bool, chunk_frames: int, window_frames: int) -> None:
        """Read the extractor's settings from a checkpoint's folder. Raises OSError if the folder lacks them.

        `chunk_frames`, `window_frames`: the number of frames in a chunk and in a window of the encoder.
        """
        self._extract: Any = WhisperFeatureExtractor.from_pretrained(folder, local_files_only=True)
        self._zero_padded, self._chunk_frames, self._window_frames = zero_padded, chunk_frames, window_frames
        self._transform = MelTransform(self._extract.mel_filters, torch.device("cpu"))
        # The sound of each turn so far, and when it was last asked for. Bound: the turns of the last KEPT_S seconds.
        self._turns: dict[SoundTrack, tuple[ClipSound, float]] = {}
        # The loudest frame of each track so far.
        self._loudest: WeakKeyDictionary[SoundTrack, float] = WeakKeyDictionary()

    def clip(self, part: AudioPart) -> ClipSound:
        """Return the spectrogram of a clip of any length. Calls for one turn must not overlap, and share the result.

        Only what follows the frames of an earlier call for the same turn is computed. All frames have a floor, 8
        decades below the loudest one. So louder audio may change earlier windows.
        """
        turn, now_s = part.turn, time.monotonic()
        for other, (_, used_s) in list(self._turns.items()):
            if used_s < now_s - KEPT_S:
                self._turns.pop(other, None)
        sound = self._turns[turn][0] if turn in self._turns else None
        if sound is None:
            mel = GrowingMel(self._transform.bins, self._chunk_frames, self._window_frames, MIN_SAMPLES)
            sound = ClipSound(part if turn is None else turn, mel, self._window_frames)
        if turn is not None:
            self._turns[turn] = sound, now_s
        mel, pcm = sound.mel, part.pcm
        if self._zero_padded:
            pcm = np.pad(pcm, (0, max(0, MIN_SAMPLES - len(pcm)) + SPAN))
        new = mel.new_part(pcm)
        ((frames, peaks),) = self._transform([new])
        mel.add(pcm, new, frames, peaks)
        sound.update(-(-(len(pcm) - SPAN) // HOP) if self._zero_padded else mel.num_frames, grows=part.grows)
        return sound

    def window(self, window: SoundWindow) -> Pcm:
        """Return the spectrogram of a window of a video's sound, as a part of the spectrogram of all sound so far.

        All frames depend on the loudest one, because the floor is 8 decades below it. If louder sound follows, frames
        that were already returned do not change.
        """
        num_own = len(window.pcm) - window.num_before - window.num_after
        is_last = self._zero_padded and not window.num_after
        frames = self._frames(np.pad(window.pcm, (0, SPAN)) if is_last else window.pcm)
        begin = window.num_before // HOP
        end = begin + (-(-num_own // HOP) if is_last else num_own // HOP)
        loudest = max(self._loudest.get(window.track, -np.inf), float(frames.max()))
        self._loudest[window.track] = loudest
        floored: Pcm = np.maximum(frames[:, begin:end], loudest - FLOOR)
        return floored

    def _frames(self, pcm: Pcm) -> Pcm:
        made = self._extract(
            pcm,
            sampling_rate=SAMPLE_RATE_HZ,
            padding=True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="np",
        )
        found: Pcm = made["input_features"][0][:, : int(made["attention_mask"][0].sum())]
        return found
