"""Audio and images as rows of the thinker's input: 13 or 25 rows a second of audio, up to 768 an image."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio.to_thread
import torch

from antiphon.audio import Pcm
from antiphon.contracts import ImagePart, MediaPart, SoundWindow, VideoPart
from antiphon.engine.model_thread import ModelThread
from antiphon.errors import MediaError, ModelError
from antiphon.modeling.media_rows import ChatRow, MediaRows
from antiphon.modeling.omni.sound import SoundFeatures
from antiphon.modeling.omni.video_rows import VideoLayout
from antiphon.modeling.qwen_vision import QwenVisionEncoder

# Pixels. Larger images are scaled down to this before anything else: the encoder sees no more of them.
MAX_SIDE = 2048


class OmniMediaEncoder:
    """A MediaEncoder: features are made in a helper thread, and both encoders run in the thinker's, between its steps.

    `thinker`: a model of `transformers` whose encoders are used. `words`: its tokenizer. `thread`: the one that steps
    it. `window_s`: seconds of a video's sound that the encoder attends over at once. `has_tap`: as
    MediaEncoder has it. Nothing is kept between calls.
    """

    def __init__(self, folder: Path, thinker: Any, words: Any, thread: ModelThread, *, has_tap: bool = False) -> None:
        """Read the processors' settings from the folder. Raises OSError, ValueError where they are missing."""
        config = thinker.config
        # Only Qwen2.5-Omni has chunks of frames and sound, joins the tokens around them, and pads sound to one length.
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
        hearing = config.audio_config
        self._chunk_frames = 2 * int(hearing.n_window)
        self.window_s = int(getattr(hearing, "n_window_infer", self._chunk_frames)) / 100
        self.has_tap = has_tap
        self._thread, self._model = thread, thinker
        self._vision_encoder = QwenVisionEncoder(folder, thinker, config.vision_config)
        self._sound = SoundFeatures(folder, zero_padded=old)

    async def encode(self, part: MediaPart) -> MediaRows:
        """Return the rows of one audio clip or image; those of an image have positions.

        Waits for a thread and for the engine. Raises MediaError for what is no image, ModelError for what a processor
        or an encoder fails on, Refused once the thread is closed.
        """
        try:
            prepared = await anyio.to_thread.run_sync(self._prepared, part)
        except MediaError:
            raise
        except Exception as error:
            # The edge of the model: what its processors raise fails the response, and nothing else.
            raise ModelError(f"{type(error).__name__}: {error}") from error
        if isinstance(part, ImagePart):
            seen = await self._thread.call_model(lambda: self._vision_encoder.look(prepared))
            return MediaRows(seen.rows, seen.positions)
        if isinstance(part, SoundWindow) and part.num_before and prepared.shape[1] < self._chunk_frames:
            return MediaRows(await self._thread.call_model(lambda: self._encode_rest(prepared)))
        return MediaRows(await self._thread.call_model(lambda: self._encode_audio(prepared)))

    def video_rows(self, video: VideoPart, sizes: Mapping[MediaPart, int]) -> list[ChatRow]:
        """Return the rows of a video in order, whose frames and windows of sound have so many rows each."""
        return self._layout.rows(video, sizes)

    def _prepared(self, part: MediaPart) -> Any:
        """What the part's encoder is given. Makes no products of torch, which belong in the model's thread."""
        if isinstance(part, ImagePart):
            return self._vision_encoder.prepare(part.image.pixels(MAX_SIDE), in_video=part.in_video)
        if isinstance(part, SoundWindow):
            return self._sound.window(part)
        return self._sound.clip(part.pcm)

    @torch.inference_mode()
    def _encode_audio(self, features: Pcm) -> torch.Tensor:
        batch = torch.from_numpy(features)[None].to(self._model.device, self._model.dtype)
        mask = torch.ones(1, batch.shape[2], dtype=torch.long, device=batch.device)
        rows: torch.Tensor = self._model.get_audio_features(batch, mask).last_hidden_state
        return rows

    @torch.inference_mode()
    def _encode_rest(self, features: Pcm) -> torch.Tensor:
        """Encode the end of a sound that is shorter than a chunk of the encoder, as it would be behind another chunk.

        The encoder pads all chunks to the longest, which changes the last row.
        """
        num_frames, num_bins = features.shape[1], features.shape[0]
        batch = torch.zeros(2, num_bins, self._chunk_frames)
        batch[1, :, :num_frames] = torch.from_numpy(features)
        mask = torch.ones(2, self._chunk_frames, dtype=torch.long)
        mask[1, num_frames:] = 0
        device, dtype = self._model.device, self._model.dtype
        both = self._model.get_audio_features(batch.to(device, dtype), mask.to(device)).last_hidden_state
        alone = self._model.get_audio_features(batch[:1].to(device, dtype), mask[:1].to(device)).last_hidden_state
        rows: torch.Tensor = both[len(alone) :]
        return rows
