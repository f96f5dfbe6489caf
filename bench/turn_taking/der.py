"""Scores speakers with pyannote.metrics, in an environment that has it: it reads and writes JSON.

    PYTHON bench/turn_taking/der.py < pairs.json

`pairs.json` is a list of `{reference, hypothesis}`, each a list of `[start_s, end_s, speaker]`. The output has the
diarization error rate of all of them together, in percent, with a collar of 0.25 s and with overlapped speech.
"""

from __future__ import annotations

import json
import sys

COLLAR_S = 0.25


def main() -> None:
    from pyannote.core import Annotation, Segment
    from pyannote.metrics.diarization import DiarizationErrorRate

    def annotation(turns: list[tuple[float, float, str]]) -> Annotation:
        out = Annotation()
        for number, (start_s, end_s, speaker) in enumerate(turns):
            out[Segment(start_s, end_s), number] = speaker
        return out

    # The package counts the collar's both sides.
    metric = DiarizationErrorRate(collar=2 * COLLAR_S, skip_overlap=False)
    for pair in json.load(sys.stdin):
        metric(annotation(pair["reference"]), annotation(pair["hypothesis"]))
    parts = {name: metric[name] for name in ("missed detection", "false alarm", "confusion", "total")}
    total = parts.pop("total")
    shares = {name.replace(" ", "_"): round(100 * seconds / total, 1) for name, seconds in parts.items()}
    json.dump({"der": round(100 * abs(metric), 1), **shares}, sys.stdout)


if __name__ == "__main__":
    main()
