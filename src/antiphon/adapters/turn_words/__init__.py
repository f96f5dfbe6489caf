"""Turn detectors that read the words of a turn. They run in a lane."""

from antiphon.adapters.spec import Spec

SPEC = Spec(
    role="turn",
    model="antiphon.adapters.turn_words.handoff:Handoff",
    runs_on="lane",
    model_types=("modernbert",),
    extra="",
)
