"""Piper: voices of many languages, each an ONNX file and its JSON, which run in a lane."""

from antiphon.adapters.spec import Spec

SPEC = Spec(
    role="synthesizer",
    model="antiphon.adapters.piper.synthesizer:Piper",
    runs_on="lane",
    extra="speech",
    takes_voices=True,
    files="*.onnx",
    describe="antiphon.adapters.piper.files:describe",
)
