"""Silero VAD: a voice activity detector, which runs in a lane."""

from antiphon.adapters.spec import Spec

SPEC = Spec(role="vad", model="antiphon.adapters.silero.detector:SileroDetector", runs_on="lane", extra="")
