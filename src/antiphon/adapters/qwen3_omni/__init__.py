"""Qwen3-Omni (arXiv:2509.17765): a conversation model that hears, sees, writes and speaks."""

from antiphon.adapters.spec import Spec
from antiphon.engine.api import Capabilities

SPEC = Spec(
    role="conversation_model",
    model="antiphon.adapters.qwen3_omni.model:Qwen3Omni",
    runs_on="engine",
    # Audio and images are embeddings from the encoders, and replies may be constrained to tool calls. The talker reads
    # hidden states of the thinker and chooses codes. It replaces the row of a code by a row of its frame every 80 ms.
    # An engine that recomputes other rows each time would be too slow.
    requires=(
        Capabilities.EMBEDDING_ROWS
        | Capabilities.EXACT_ROLLBACK
        | Capabilities.HIDDEN_STATES
        | Capabilities.CHOOSER
        | Capabilities.PREFILL_AHEAD
        | Capabilities.GRAMMAR
    ),
    model_types=("qwen3_omni_moe",),
    language_model="thinker",
)
