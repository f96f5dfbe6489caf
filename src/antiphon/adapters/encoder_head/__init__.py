"""Turn detectors that are a small head over the frames of a speech encoder. They run in a lane: two ONNX graphs."""

from antiphon.adapters.spec import Spec

SPEC = Spec(
    role="turn",
    model="antiphon.adapters.encoder_head.turn_detector:EncoderHead",
    runs_on="lane",
    model_types=("encoder_head",),
    extra="",
)
