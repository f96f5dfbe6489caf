"""MiniCPM-o 4.5 (openbmb/MiniCPM-o-4_5): a native model, which each second decides by itself to listen or to speak.

Built from `transformers` parts under the parameter names of the released checkpoint. `checkpoint.py` reads it,
`audio_encoder.py` and `vision_encoder.py` make embeddings, `sampling.py` chooses tokens, `speech_decoder.py` makes
codes of them and `token2wav.py` audio of the codes; `model.py` is the model and its conversations.
"""

from antiphon.adapters.spec import Spec
from antiphon.engine.api import Capabilities

SPEC = Spec(
    role="conversation_model",
    model="antiphon.adapters.minicpmo.model:MiniCpmO",
    runs_on="engine",
    # Units are rows of the encoders'. The oldest leave the context, after those that stay were computed with them. The
    # adapter chooses tokens and codes, and codes are made of the tokens' hidden states.
    requires=(
        Capabilities.EMBEDDING_ROWS
        | Capabilities.EVICT
        | Capabilities.HIDDEN_STATES
        | Capabilities.CHOOSER
        | Capabilities.PREFILL_AHEAD
    ),
    model_types=("minicpmo",),
    native=True,
)
