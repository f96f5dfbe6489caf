"""pipecat-ai/backchannel-detector: whether speech over a response takes the floor, which runs in a lane."""

from antiphon.adapters.spec import Spec

SPEC = Spec(
    role="backchannel",
    model="antiphon.adapters.sound_backchannel.detector:SoundBackchannelDetector",
    runs_on="lane",
    model_types=("backchannel-detector",),
    extra="",
)
