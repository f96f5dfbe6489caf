"""Qwen3-TTS, 12 Hz (arXiv:2601.15621): a synthesizer on the engine, written from the model's published behaviour."""

from antiphon.adapters.spec import Spec
from antiphon.engine.api import Capabilities

SPEC = Spec(
    role="synthesizer",
    model="antiphon.adapters.qwen3_tts.synthesizer:Qwen3Tts",
    runs_on="engine",
    # The adapter chooses each frame's first code; the code predictor makes the others of its hidden state. The frame
    # then takes the place of the code's row, every 80 ms: too often for rows before it to be computed again.
    requires=(
        Capabilities.EMBEDDING_ROWS | Capabilities.EXACT_ROLLBACK | Capabilities.HIDDEN_STATES | Capabilities.CHOOSER
    ),
    model_types=("qwen3_tts",),
)
