"""Text language models: one class for every causal decoder that `transformers` supports."""

from antiphon.adapters.spec import Spec
from antiphon.engine.api import Capabilities

SPEC = Spec(
    role="language",
    model="antiphon.adapters.causal_lm.model:CausalLm",
    runs_on="engine",
    # A reply may be constrained to a schema or to tool calls.
    requires=Capabilities.GRAMMAR,
    # `transformers` has too many causal decoders to list. This adapter loads every type that no other adapter lists.
    model_types=(),
    prepare="antiphon.adapters.causal_lm.checkpoint:prepare",
)
