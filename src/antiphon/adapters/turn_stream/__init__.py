"""Turn detectors that take audio in chunks and keep state, which run in a lane: ONNX graphs in the user's folders."""

from antiphon.adapters.spec import Spec

SPEC = Spec(
    role="turn",
    model="antiphon.adapters.turn_stream.turn_detector:StreamedTurnDetector",
    runs_on="lane",
    model_types=("turn_stream", "turn-1-mini", "streaming-turn"),
    extra="",
)
