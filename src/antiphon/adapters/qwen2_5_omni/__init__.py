"""Qwen2.5-Omni (arXiv:2503.20215): a conversation model that hears, sees, writes and speaks."""

from antiphon.adapters.spec import Spec
from antiphon.engine.api import Capabilities

SPEC = Spec(
    role="conversation_model",
    model="antiphon.adapters.qwen2_5_omni.model:Qwen25Omni",
    runs_on="engine",
    # Audio and images are embeddings from the encoders, and replies may be constrained to tool calls. The talker reads
    # hidden states of the thinker and chooses codes. It replaces the row of a code every 20 ms. An engine that
    # recomputes other rows each time would be too slow.
    requires=(
        Capabilities.EMBEDDING_ROWS
        | Capabilities.EXACT_ROLLBACK
        | Capabilities.HIDDEN_STATES
        | Capabilities.CHOOSER
        | Capabilities.PREFILL_AHEAD
        | Capabilities.GRAMMAR
    ),
    model_types=("qwen2_5_omni",),
    uses=("synthesizer",),
    language_model="thinker",
)
