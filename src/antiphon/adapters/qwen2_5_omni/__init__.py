"""Qwen2.5-Omni (arXiv:2503.20215): a conversation model that hears, sees, writes and speaks."""

from antiphon.adapters.spec import Spec
from antiphon.engine.api import Capabilities

SPEC = Spec(
    role="conversation_model",
    model="antiphon.adapters.qwen2_5_omni.model:Qwen25Omni",
    runs_on="engine",
    # Audio and images are rows of the encoders', and replies may be held to tools. The talker reads hidden states of
    # the thinker, chooses codes, and replaces a code's row every 20 ms: too often to compute others again.
    requires=(
        Capabilities.EMBEDDING_ROWS
        | Capabilities.EXACT_ROLLBACK
        | Capabilities.HIDDEN_STATES
        | Capabilities.CHOOSER
        | Capabilities.GRAMMAR
    ),
    model_types=("qwen2_5_omni",),
    uses=("synthesizer",),
    language_model="thinker",
)
