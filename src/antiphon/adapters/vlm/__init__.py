"""Vision-language models on an engine, for video. All families share `session.py`, and each has its own module."""

from antiphon.adapters.spec import Spec
from antiphon.engine.api import Capabilities

SPEC = Spec(
    role="video_model",
    model="antiphon.adapters.vlm.session:VisionLanguageModel",
    runs_on="engine",
    # The rows of pictures are embeddings from the encoder.
    requires=Capabilities.EMBEDDING_ROWS,
    model_types=("smolvlm", "idefics3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    uses=("synthesizer", "transcriber"),
)
