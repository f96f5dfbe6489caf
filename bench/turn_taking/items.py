"""`antiphon bench turns --items DIR`: turns of other benchmarks, whose pauses and ends are labelled.

DIR has rows of eot-bench (github.com/livekit/eot-bench) or TurnBench (github.com/SesameAILabs/turnbench): Parquet
files as on the hub, or a `rows.jsonl` with the same fields, in which audio is the path of a file.

- eot-bench: `id`, `language`, `audio` and `silence_spans` (`start` and `end` in seconds). The last span is the end of
  the turn, all others are pauses inside it. Pauses of 0.2 to 5 s count. `words` and `messages` are not used: the words
  are those of our transcriber.
- TurnBench: `conversation_id`, and for each of two speakers an audio channel and the segments of three annotators
  (`start_s`, `end_s`, `label`). What two annotators agree on is a segment. A segment's end is the end of a turn if the
  other speaker has the floor next, and else a pause. Pauses with a sound or a disagreement inside are left out, where
  TurnBench shortens them. Interruptions are not used.

At 0.2 s of each span, the server's turn detector judges the audio so far, and the transcriber writes its words. The
table has the points of eot-bench (false cut-offs at a mean wait of 300 and 600 ms, the mean wait at 5 and 10 % of
cut-offs) and those of TurnBench (ends found within 3 s), for the detector alone and for the end-of-turn model.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from bench.common import HERE, show
from bench.referees.servers import environment
from bench.turn_taking.figures import share
from bench.turn_taking.pauses import JUDGE_AFTER_S, MAX_CHARS, Listener, Pause
from bench.turn_taking.replay import Rule, at_eagerness, listening, outcome, turn_detector_alone

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.containers import decode_all

ANNOTATORS, AGREE_S = "abc", 0.2
# The labels with which a speaker has the floor, as TurnBench groups them.
FLOOR = frozenset((
    "Normal Turn", "Regular Turn", "Strong Floor Hold", "Bounded Response", "Filler", "Overlap",
    "Floor-taking Competitive Interruption", "Floor-taking Cooperative Interruption",
))  # fmt: skip
# The pauses that count, and the seconds of a turn before a pause that are given to the models.
SHORTEST_S, LONGEST_S, BEFORE_S = 0.2, 5.0, 20.0
# Seconds after an end in which TurnBench looks for it.
FOUND_S = 3.0
THRESHOLDS = tuple(np.linspace(0.02, 0.98, 25))
DELAYS_MS, TIMEOUTS_MS = range(200, 1700, 200), range(500, 5500, 500)
WAITS_S, CUT_OFFS = (0.3, 0.6), (0.05, 0.10)
EAGERNESS = ("low", "medium", "high", "auto")


@dataclass(frozen=True, slots=True)
class LabelledTurn:
    """One turn of one speaker."""

    # Its name, unique within the folder.
    id: str
    # The speaker; for eot-bench, which names none, the turn's name.
    speaker: str
    # ISO 639-1.
    language: str
    # float32, mono, 16 kHz.
    pcm: Pcm = field(repr=False)
    # The pauses inside the turn: start and end in seconds of `pcm`.
    pauses: tuple[tuple[float, float], ...]
    # Where the turn ends, in seconds of `pcm`.
    end_s: float


Segment = tuple[float, float]


@contextmanager
def rows_of(folder: Path) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """Yield the rows of a data set, and the folder of their audio. Raises SystemExit if the folder has none."""
    with tempfile.TemporaryDirectory(prefix="items-") as name:
        here = folder
        if not (folder / "rows.jsonl").is_file():
            if not any(folder.rglob("*.parquet")):
                raise SystemExit(f"{folder} has no Parquet file and no rows.jsonl")
            here = Path(name)
            program = HERE / "peers" / "parquet" / "rows.py"
            subprocess.run([str(environment("parquet")), str(program), str(folder), str(here)], check=True)
        lines = (here / "rows.jsonl").read_text(encoding="utf-8").splitlines()
        yield here, [json.loads(line) for line in lines]


def turns_of(row: Mapping[str, Any], folder: Path) -> Iterator[LabelledTurn]:
    """Return the turns of a row of either benchmark. Raises SystemExit if it is a row of neither."""
    if "silence_spans" in row:
        yield from _eot_bench(row, folder)
    elif "speaker_1_annotation_a" in row:
        yield from _turn_bench(row, folder)
    else:
        raise SystemExit(f"this is no row of eot-bench or TurnBench; it has {', '.join(sorted(row))}")


def _eot_bench(row: Mapping[str, Any], folder: Path) -> Iterator[LabelledTurn]:
    spans = [(float(span["start"]), float(span["end"])) for span in row["silence_spans"]]
    if not spans:
        return
    pauses = tuple(span for span in spans[:-1] if SHORTEST_S <= span[1] - span[0] <= LONGEST_S)
    pcm = decode_all(str(folder / row["audio"]))
    yield LabelledTurn(str(row["id"]), str(row["id"]), row["language"], pcm, pauses, spans[-1][0])


def agreed(tracks: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[list[Segment], list[Segment]]:
    """Return the floor segments on which two of the annotators agree, and the times at which there is any other label
    or a segment without agreement, both in order.
    """
    claims = [[(e["start_s"], e["end_s"]) for e in track if e["label"] in FLOOR] for track in tracks]
    others = [(e["start_s"], e["end_s"]) for track in tracks for e in track if e["label"] not in FLOOR]
    used, found = set[tuple[int, Segment]](), list[Segment]()
    for k, track in enumerate(claims):
        for claim in track:
            if (k, claim) in used:
                continue
            same = [(k, claim)]
            for j in range(k + 1, len(claims)):
                near = (
                    c
                    for c in claims[j]
                    if (j, c) not in used and all(abs(a - b) <= AGREE_S for a, b in zip(c, claim, strict=True))
                )
                same += [(j, c) for c in [next(near, None)] if c]
            if len(same) > 1:
                used.update(same)
                found.append((median(c[0] for _, c in same), median(c[1] for _, c in same)))
    alone = [c for k, track in enumerate(claims) for c in track if (k, c) not in used and not _touches(c, found)]
    return sorted(found), sorted(others + alone)


def _touches(segment: Segment, others: Sequence[Segment]) -> bool:
    return any(start < segment[1] and segment[0] < end for start, end in others)


def _turn_bench(row: Mapping[str, Any], folder: Path) -> Iterator[LabelledTurn]:
    sides = [
        agreed([row[f"speaker_{speaker}_annotation_{annotator}"] or [] for annotator in ANNOTATORS])
        for speaker in (1, 2)
    ]
    for speaker, ((own, own_sounds), (other, other_sounds)) in zip((1, 2), (sides, sides[::-1]), strict=True):
        if not own:
            continue
        pcm = decode_all(str(folder / row[f"speaker_{speaker}_audio"]))
        first, pauses, number = own[0][0], list[Segment](), 0
        for k, (_, end) in enumerate(own):
            resumes = own[k + 1][0] if k + 1 < len(own) else np.inf
            # The first time at which the other speaker has the floor after this end, or has it already.
            taken = min((max(start, end) for start, stop in other if stop > end), default=np.inf)
            if taken < resumes or resumes == np.inf:
                # Each turn has its own audio, with what follows it.
                at = max(0.0, first - 0.3)
                part = pcm[round(at * SAMPLE_RATE_HZ) : round((end + 1) * SAMPLE_RATE_HZ)]
                shifted = tuple((start - at, stop - at) for start, stop in pauses)
                name = f"{row['conversation_id']}-{speaker}"
                yield LabelledTurn(f"{name}-{number}", name, "en", part, shifted, end - at)
                pauses, number = [], number + 1
                first = resumes
            elif SHORTEST_S <= resumes - end <= LONGEST_S and not _touches((end, resumes), own_sounds + other_sounds):
                pauses.append((end, resumes))


async def judged(turn: LabelledTurn, listener: Listener, corpus: str) -> list[Pause]:
    """Return what the server knows at 0.2 s of each pause of a turn, and at its end."""
    out = []
    for start, end in (*turn.pauses, (turn.end_s, None)):
        heard = turn.pcm[: round((start + JUDGE_AFTER_S) * SAMPLE_RATE_HZ)]
        # A recording may be cut at the end of the turn.
        missing = round((start + JUDGE_AFTER_S) * SAMPLE_RATE_HZ) - len(heard)
        heard = np.pad(heard, (0, max(0, missing)))[-round(BEFORE_S * SAMPLE_RATE_HZ) :]
        complete, text = await listener.judged(heard)
        length_s = None if end is None else round(end - start, 3)
        facts = (turn.id, round(start, 3), turn.speaker, corpus, "conversation", turn.language, False, length_s)
        out.append(Pause(*facts, round(complete, 4), None, text[-MAX_CHARS:], len(text.split())))
    return out


def points(rules: Sequence[Rule], inner: Sequence[Pause], ends: Sequence[Pause]) -> dict[str, Any]:
    """Return the best that any of the rules reaches: cut-offs at a mean wait, and mean waits at a share of cut-offs."""
    reached = [outcome(rule, inner, ends, resamples=0) for rule in rules]
    row: dict[str, Any] = {}
    for wait_s in WAITS_S:
        cut = [o.cut_off for o in reached if o.wait_mean_s <= wait_s]
        row[f"cut_off_at_{1000 * wait_s:.0f}_ms"] = share(round(min(cut) * len(inner)), len(inner)) if cut else None
    for cut_off in CUT_OFFS:
        waits = [o.wait_mean_s for o in reached if o.cut_off <= cut_off]
        row[f"wait_s_at_{100 * cut_off:.0f}_percent"] = round(min(waits), 3) if waits else None
    return row


def measured(pauses: Sequence[Pause]) -> dict[str, Any]:
    """Return the points of both benchmarks, and the outcome of each eagerness."""
    inner, ends = [p for p in pauses if p.length_s is not None], [p for p in pauses if p.length_s is None]
    if not inner or not ends:
        raise SystemExit("there is no pause inside a turn, or no end of a turn")
    alone = [
        turn_detector_alone(threshold, delay_ms, timeout_ms)
        for threshold in THRESHOLDS
        for delay_ms in DELAYS_MS
        for timeout_ms in TIMEOUTS_MS
        if timeout_ms >= delay_ms
    ]
    together = [listening(threshold) for threshold in THRESHOLDS]
    settings = {eagerness: at_eagerness(eagerness, pauses) for eagerness in EAGERNESS}
    return {
        "pauses": len(inner),
        "ends": len(ends),
        "points": {
            "turn detector": points(alone, inner, ends),
            "with words and silence": points(together, inner, ends),
        },
        "eagerness": {name: outcome(rule, inner, ends).row() | _found(rule, ends) for name, rule in settings.items()},
    }


def _found(rule: Callable[[Pause], float], ends: Sequence[Pause]) -> dict[str, Any]:
    return {"ends_found_in_3_s": share(sum(rule(p) <= 1000 * FOUND_S for p in ends), len(ends))}


def items(folder: Path, detector: str = "") -> dict[str, Any]:
    """Measure the turns of a folder, by language. `detector`: as in `antiphon serve --turn-detector`."""

    async def find() -> dict[str, list[Pause]]:
        found: dict[str, list[Pause]] = {}
        listener = Listener(detector)
        try:
            with rows_of(folder) as (here, rows):
                for row in rows:
                    for turn in turns_of(row, here):
                        found.setdefault(turn.language, []).extend(await judged(turn, listener, folder.name))
        finally:
            listener.close()
        return found

    out = {language: measured(pauses) for language, pauses in asyncio.run(find()).items()}
    for language, result in out.items():
        show(f"{language}: {result['pauses']} pauses, {result['ends']} ends", {
            name: {key: value["percent"] if isinstance(value, dict) else value for key, value in row.items()}
            for name, row in (result["points"] | result["eagerness"]).items()
        })  # fmt: skip
    return {"folder": folder.name, "turn_detector": detector or "default"} | out
