"""hibari: a synthesizer with English voices, which runs in a lane."""

from antiphon.adapters.spec import Spec

SPEC = Spec(
    role="synthesizer",
    model="antiphon.adapters.hibari.synthesizer:Hibari",
    runs_on="lane",
    extra="speech",
    takes_voices=True,
)
