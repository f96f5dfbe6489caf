"""Qwen3-ASR (arXiv:2601.21337): a transcriber on an engine, written from the published behaviour of the model."""

from antiphon.adapters.spec import Spec
from antiphon.engine.api import Capabilities

SPEC = Spec(
    role="transcriber",
    model="antiphon.adapters.qwen3_asr.transcriber:Qwen3Asr",
    runs_on="engine",
    # The rows of audio are embeddings from the encoder.
    requires=Capabilities.EMBEDDING_ROWS,
    model_types=("qwen3_asr",),
)
