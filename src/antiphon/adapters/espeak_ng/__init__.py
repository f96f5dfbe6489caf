"""eSpeak NG: a synthesizer of many languages by rules, which speaks what no other loaded voice does."""

from antiphon.adapters.spec import Spec

SPEC = Spec(role="fallback", model="antiphon.adapters.espeak_ng.synthesizer:Espeak", runs_on="lane", extra="speech")
