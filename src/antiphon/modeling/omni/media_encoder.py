"""Audio, images and videos as rows of the thinker's input: 13 or 25 rows a second of audio, up to 768 an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from antiphon.contracts import AudioPart, ImagePart, MediaPart, SoundWindow, VideoPart
from antiphon.engine.model_thread import ModelThread
from antiphon.errors import MediaError, ModelError
from antiphon.modeling.gathered import ImageBatch
from antiphon.modeling.media_rows import AudioWindow, ChatRow, MediaPiece, MediaRows
from antiphon.modeling.omni.sound import SoundFeatures
from antiphon.modeling.omni.sound_encoder import SoundEncoder, SoundFrames
from antiphon.modeling.qwen_vision import QwenVisionEncoder
from antiphon.shares.threads import IMAGE_THREADS, THREADS, in_thread


@dataclass(frozen=True, slots=True)
class VideoLayout:
    """The order of the rows of a video with sound: by their times, interleaved as in the models' own processors.

    A row's time is its number of positions from the start of the video. A position is one row of sound: 25 a second
    (Qwen2.5-Omni) or 13 a second (Qwen3-Omni).

    `positions_per_s`: positions a second. `chunk`: the number of positions in a chunk, in which all frames precede the
    sound; 0: there are no chunks, and each frame directly precedes the sound of its time. `sound_start`, `sound_end`:
    the tokens around frames and sound, if the video has sound.
    """

    positions_per_s: float
    chunk: int
    sound_start: int
    sound_end: int

    def rows(self, video: VideoPart, sizes: Mapping[MediaPart, int]) -> list[ChatRow]:
        """Return the rows of a video. `sizes`: the number of rows of each frame and window of sound.

        If more sound is expected, the rows after the sound that has arrived are left out.
        """
        # Pairs of a sort key and the rows of a frame, or one row of sound.
        placed: list[tuple[tuple[int, ...], list[ChatRow]]] = []
        for at_s, image in video.frames:
            at = self._position(at_s)
            placed.append((self._key(at, 0), [(image, i, at) for i in range(sizes[image])]))
        at = self._position(video.sound_at_s)
        for window in video.sound:
            placed += [(self._key(at + i, 1), [(window, i, at)]) for i in range(sizes[window])]
            at += sizes[window]
        if video.goes_on:
            end = self._key(at, 1)
            placed = [(key, rows) for key, rows in placed if key < end]
        ordered = [row for _, rows in sorted(placed, key=lambda item: item[0]) for row in rows]
        if not video.sound and not video.goes_on:
            return ordered
        return [self.sound_start, *ordered, *(() if video.goes_on else (self.sound_end,))]

    def _position(self, at_s: float) -> int:
        # Qwen2.5-Omni's code rounds down. Qwen3-Omni's code keeps the fraction, but the engine needs whole positions.
        return int(at_s * self.positions_per_s + (0.0 if self.chunk else 0.5))

    def _key(self, at: int, kind: int) -> tuple[int, ...]:
        return (at // self.chunk, kind, at) if self.chunk else (at, kind)


# Limit of an image's longer side in pixels. Larger images are scaled down first; the encoder uses no higher resolution.
MAX_SIDE = 2048


class OmniMediaEncoder:
    """A MediaEncoder. Features are computed in a helper thread, and both encoders run between the thinker's steps.

    `thinker`: a model of `transformers` whose encoders are used. `words`: its tokenizer. `thread`: the thread that
    steps it. `window_s`: length in seconds of the encoder's attention window for a video's sound. `has_tap`: see
    MediaEncoder. `sound_encoder`: encodes windows of sound.
    """

    def __init__(self, folder: Path, thinker: Any, words: Any, thread: ModelThread, *, has_tap: bool = False) -> None:
        """Read the processors' settings from the folder. Raises OSError or ValueError if they are missing."""
        config = thinker.config
        # Only Qwen2.5-Omni groups frames and sound in chunks, joins the tokens around them, and pads sound to one
        # length.
        old = config.model_type.startswith("qwen2_5")
        names = (
            ("<|audio_bos|>", "<|audio_eos|>", "<|vision_bos|>", "<|vision_eos|>")
            if old
            else ("<|audio_start|>", "<|audio_end|>", "<|vision_start|>", "<|vision_end|>")
        )
        sound_start, sound_end, seen_start, seen_end = words.convert_tokens_to_ids(list(names))
        per_s = config.position_id_per_seconds
        chunk = int(per_s * config.seconds_per_chunk) if old else 0
        self._layout = VideoLayout(per_s, chunk, sound_start, sound_end)
        self.joined = frozenset(((seen_start, sound_start), (sound_end, seen_end)) if old else ())
        self.placeholder_ids = frozenset(
            (int(config.audio_token_id), int(config.image_token_id), int(config.video_token_id))
        )
        self.sound_encoder = SoundEncoder(thinker, thread)
        self.window_frames = self.sound_encoder.window_frames
        self.window_s = self.window_frames / 100
        self.has_tap = has_tap
        self._vision_encoder = vision = QwenVisionEncoder(folder, thinker, config.vision_config)
        self._images = ImageBatch(thread, vision.look, vision.num_patches, thinker.device.type)
        chunk_frames = self.sound_encoder.chunk_frames
        self._sound = SoundFeatures(
            folder, zero_padded=old, chunk_frames=chunk_frames, window_frames=self.window_frames
        )

    async def encode(self, part: MediaPart) -> MediaRows:
        """Return the rows of one audio clip or image; those of an image have positions.

        Waits for a thread and for the engine. Raises MediaError if the data is not an image, ModelError if a processor
        or an encoder fails, and Refused after the thread is closed.
        """
        if isinstance(part, AudioPart):
            return MediaRows(torch.cat([made.rows for _, made in await self.encode_windows(part, {})]))
        try:
            places = IMAGE_THREADS if isinstance(part, ImagePart) else THREADS
            prepared = await in_thread(self._prepared, part, places=places)
        except MediaError:
            raise
        except Exception as error:
            # The model's processors may raise any exception. It must fail only this response.
            raise ModelError(f"{type(error).__name__}: {error}") from error
        if isinstance(part, ImagePart):
            (seen,) = await self._images.rows([prepared])
            return MediaRows(seen.rows, seen.positions)
        (rows,) = await self.sound_encoder.encode([SoundFrames(prepared, padded=part.num_before > 0)])
        return MediaRows(rows)

    async def encode_windows(
        self, part: AudioPart, held: Mapping[MediaPiece, MediaRows]
    ) -> Sequence[tuple[AudioWindow, MediaRows]]:
        """Return the encoder windows of an audio clip with their rows; of a growing clip, only the finished windows.

        The encoder attends only within a window, so each window is encoded separately. The features depend on the
        loudest frame of the clip. If a new loudest frame changes a window's features, its digest differs, and it is
        encoded again. Raises ModelError if the extractor or the encoder fails, and Refused after the thread is closed.
        """
        try:
            sound = await in_thread(self._sound.clip, part)
        except Exception as error:
            # Any exception, as in `encode`.
            raise ModelError(f"{type(error).__name__}: {error}") from error
        # The chunks of a clip are padded to the length of its longest chunk. In all windows except the first, that is a
        # whole chunk.
        new = {
            window: SoundFrames(sound.frames(window.number), padded=window.number > 0)
            for window in sound.windows
            if window not in held
        }
        windows = sound.windows
        made = dict(zip(new, map(MediaRows, await self.sound_encoder.encode(list(new.values()))), strict=True))
        return [(window, made[window] if window in made else held[window]) for window in windows]

    def video_rows(self, video: VideoPart, sizes: Mapping[MediaPart, int]) -> list[ChatRow]:
        """Return the rows of a video in order. `sizes`: the number of rows of each frame and window of sound."""
        return self._layout.rows(video, sizes)

    def _prepared(self, part: ImagePart | SoundWindow) -> Any:
        """The input of the part's encoder. Must not run torch's matrix products, which belong in the model's thread."""
        if isinstance(part, ImagePart):
            return self._vision_encoder.prepare(part.image.pixels(MAX_SIDE), in_video=part.in_video)
        return self._sound.window(part)
