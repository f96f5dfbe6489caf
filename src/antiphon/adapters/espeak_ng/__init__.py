"""eSpeak NG: a rule-based synthesizer for the languages that no other loaded voice speaks."""

from antiphon.adapters.spec import Spec

SPEC = Spec(role="fallback", model="antiphon.adapters.espeak_ng.synthesizer:Espeak", runs_on="lane", extra="speech")
