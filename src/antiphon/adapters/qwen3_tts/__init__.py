"""Qwen3-TTS, 12 Hz (arXiv:2601.15621): a synthesizer on an engine, written from the model's published behaviour."""

from antiphon.adapters.spec import Spec
from antiphon.engine.api import Capabilities

SPEC = Spec(
    role="synthesizer",
    model="antiphon.adapters.qwen3_tts.synthesizer:Qwen3Tts",
    runs_on="engine",
    # The adapter chooses the first code of each frame, and the code predictor computes the other codes from the hidden
    # state. Every 80 ms, a row of the whole frame replaces the row of the first code. An engine that recomputes earlier
    # rows each time would be too slow.
    requires=(
        Capabilities.EMBEDDING_ROWS | Capabilities.EXACT_ROLLBACK | Capabilities.HIDDEN_STATES | Capabilities.CHOOSER
    ),
    model_types=("qwen3_tts",),
)
