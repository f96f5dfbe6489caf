"""MiniCPM-o 4.5 (openbmb/MiniCPM-o-4_5): a native model, which decides each second whether to listen or to speak.

It is built from `transformers` parts under the parameter names of the released checkpoint. `checkpoint.py` reads the
checkpoint, `audio_encoder.py` and `vision_encoder.py` compute embeddings, and `sampling.py` chooses tokens.
`log_mel.py` transforms the sound, and `audio_batch.py` encodes that of all conversations together. `speech_decoder.py`
turns tokens into codes, and `token2wav/` turns codes into audio. `model.py` has the model and its conversations.
"""

from antiphon.adapters.spec import Spec
from antiphon.engine.api import Capabilities

SPEC = Spec(
    role="conversation_model",
    model="antiphon.adapters.minicpmo.model:MiniCpmO",
    runs_on="engine",
    # The rows of a unit are embeddings from the encoders. The oldest units are evicted; the rows that stay were
    # computed while the evicted ones were still in the context. The adapter itself chooses tokens and codes, and
    # computes codes from the hidden states of tokens.
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
