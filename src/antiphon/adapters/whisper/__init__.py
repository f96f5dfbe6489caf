"""Whisper on CTranslate2: a transcriber, which runs in a lane."""

from antiphon.adapters.spec import Spec

SPEC = Spec(
    role="transcriber",
    model="antiphon.adapters.whisper.transcriber:WhisperTranscriber",
    runs_on="lane",
    extra="",
    takes_partials=True,
)
