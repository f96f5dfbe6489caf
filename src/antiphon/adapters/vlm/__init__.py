"""Vision-language models on the engine, for video: `session.py` is shared, and each family has one module."""

from antiphon.adapters.spec import Spec
from antiphon.engine.api import Capabilities

SPEC = Spec(
    role="video_model",
    model="antiphon.adapters.vlm.session:VisionLanguageModel",
    runs_on="engine",
    # Pictures are rows of the encoder's.
    requires=Capabilities.EMBEDDING_ROWS,
    model_types=("smolvlm", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    uses=("synthesizer", "transcriber"),
)
