"""Qwen3-TTS, 12 Hz (arXiv:2601.15621): a synthesizer on an engine, written from the model's published behaviour."""

from antiphon.adapters.spec import Spec
from antiphon.engine.api import Capabilities

SPEC = Spec(
    role="synthesizer",
    model="antiphon.adapters.qwen3_tts.synthesizer:Qwen3Tts",
    runs_on="engine",
    # The adapter chooses each frame's first code; the code predictor computes the others from its hidden state. The
    # frame then replaces the code's row, every 80 ms, which is too often to recompute earlier rows.
    requires=(
        Capabilities.EMBEDDING_ROWS | Capabilities.EXACT_ROLLBACK | Capabilities.HIDDEN_STATES | Capabilities.CHOOSER
    ),
    model_types=("qwen3_tts",),
)
