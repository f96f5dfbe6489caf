"""The reference for frames computed within a step: each frame is a separate generation of one token."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

import torch

from antiphon.adapters.qwen3_tts.synthesizer import Qwen3Tts
from antiphon.engine.api import Sampling, Session
from antiphon.engine.local.device_sampling import RandomNumbers, RowChoices
from antiphon.modeling.codec.talker import CodecSampling, FirstCodeChooser


async def reference_frames(
    model: Qwen3Tts, session: Session, next_text: Callable[[], torch.Tensor], sampling: CodecSampling, max_frames: int
) -> AsyncGenerator[list[int], None]:
    """Yield the frames of the session's text. `next_text`: returns the text row [width] of the next frame."""
    parts, end = model.parts, model.parts.special_ids.end
    predictor, table = parts.code_predictor, parts.decoder.get_input_embeddings()
    chooser = FirstCodeChooser(sampling.first, end, int(parts.decoder.config.vocab_size), sampling.min_frames)
    random, choices = RandomNumbers(sampling.rest), RowChoices.of([sampling.rest], torch.device("cpu"))
    for _ in range(max_frames):
        (token,) = [t async for t in session.generate(Sampling(max_tokens=1, hidden=True, chooser=chooser))]
        if token.id == end:
            return
        session.rollback(session.length - 1)
        uniforms = torch.tensor([random.take(predictor.num_codes)], dtype=torch.float64)
        codes, summed = predictor(token.hidden[None], table(torch.tensor([token.id])), choices, uniforms)
        yield [token.id, *codes[0].tolist()]
        session.append_embeddings((summed[0] + next_text())[None])
