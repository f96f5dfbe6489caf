"""Text language models that `transformers` runs as they are: one class for every checkpoint with a causal decoder."""

from antiphon.adapters.spec import Spec
from antiphon.engine.api import Capabilities

SPEC = Spec(
    role="language",
    model="antiphon.adapters.causal_lm.model:CausalLm",
    runs_on="engine",
    # A reply may be held to a schema or to tools.
    requires=Capabilities.GRAMMAR,
    # `transformers` has too many types of causal decoders to name: this adapter takes all that no other does.
    model_types=(),
    prepare="antiphon.adapters.causal_lm.checkpoint:prepare",
)
