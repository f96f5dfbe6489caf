"""Turn-taking: ends of turns, the time until an answer falls silent for a speaker, and sounds that do not end it.

    antiphon bench turns [--data DIR] [--sections curve,barge-in,sounds,voices]
    antiphon bench turns --data DIR --sections full-duplex-bench --out FOLDER
    antiphon bench turns --data DIR --referee voicebench|hotato [--over semantic_vad,speech-to-speech] [--calls N]
    antiphon bench turns --items DIR [--turn-detector DETECTORS]

- `curve`: Smart Turn alone and the end-of-turn model, by eagerness, over the pauses of bench/results/turns-pauses.json,
  of speakers that the model was not fitted to. It needs no server and no audio. bench/turn_taking/pauses.py creates
  that file, and bench/turn_taking/fit.py fits the model to it.
- `barge-in`: the time from the onset of a voice over an answer to the client's silence, and to the decision that the
  voice interrupts.
- `sounds`: acknowledgements, sneezes, music, noise and the answer's own echo, over an answer.
- `voices`: turns of another voice with `primary_speaker` `auto`. Needs the default speaker encoder in the model folder.
- `full-duplex-bench`: conversations for the scorers of that benchmark (bench/full_duplex_bench.py). Runs only if it is
  named.

With `--referee`, a caller of another project measures this server and peers instead (bench/referees).
With `--items`, the turn detector is measured on turns of eot-bench or TurnBench (bench/turn_taking/items.py).

All sections except `curve` play real recordings in real time to a real server with the default models, with the
defaults of each mode of turn-taking. Intervals are 95 % intervals: Wilson's for shares, from a bootstrap over trials
for percentiles, Poisson's for rates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.common import RESULTS, Server, machine, options, save, server
from bench.driver import MODES
from bench.full_duplex_bench import full_duplex_bench
from bench.hearing.clips import with_data
from bench.referees.measure import REFEREES, referee
from bench.referees.servers import NAMES
from bench.turn_taking.curve import curve
from bench.turn_taking.interruptions import barge_in
from bench.turn_taking.items import items
from bench.turn_taking.replay import WORDS_MS
from bench.turn_taking.sounds import over_an_answer
from bench.turn_taking.voices import voices

Section = Callable[[argparse.Namespace], dict[str, Any]]


def live(section: Callable[[Server, argparse.Namespace], Awaitable[dict[str, Any]]]) -> Section:
    """Wrap a section that uses its own server with the default models."""

    def run(args: argparse.Namespace) -> dict[str, Any]:
        async def measured(srv: Server) -> dict[str, Any]:
            return await section(srv, args)

        with server() as srv:
            return asyncio.run(measured(srv))

    return run


def earlier(name: str) -> dict[str, Any]:
    """Return the last results of a section by mode; empty if it was never measured."""
    path = RESULTS / f"turns-{name}.json"
    found: dict[str, Any] = json.loads(path.read_text())[name] if path.is_file() else {}
    return found


SECTIONS: dict[str, Section] = {
    "curve": lambda args: curve(args.words_ms),
    "barge-in": live(lambda srv, args: barge_in(srv, args.data, args.speakers, args.modes.split(","))),
    "sounds": live(lambda srv, args: over_an_answer(srv, args.data, args.modes.split(","))),
    "voices": lambda args: voices(args.data, args.sessions),
    "full-duplex-bench": live(lambda srv, args: full_duplex_bench(srv, args.data, args.out, 20)),
}
# This section writes a folder of files, and has no figures of its own.
DEFAULT = tuple(name for name in SECTIONS if name != "full-duplex-bench")


def main() -> None:
    parser = with_data(options("antiphon bench turns", __doc__, DEFAULT))
    parser.add_argument(
        "--words-ms", type=float, default=WORDS_MS, help="`curve`: the silence at which the words are known"
    )
    parser.add_argument("--speakers", type=int, default=26, help="`barge-in`: speakers, each once a mode")
    parser.add_argument("--modes", default=",".join(MODES), help="of `barge-in` and `sounds`; others stay as measured")
    parser.add_argument("--sessions", type=int, default=24, help="`voices`: sessions, of a user each")
    parser.add_argument("--out", type=Path, help="`full-duplex-bench`: the folder to write")
    parser.add_argument(
        "--referee", choices=tuple(REFEREES), help="measure with this package's caller, not by sections"
    )
    parser.add_argument("--items", type=Path, help="measure the turn detector on a folder of eot-bench or TurnBench")
    parser.add_argument("--turn-detector", default="", help="`--items`: as in antiphon serve")
    parser.add_argument("--over", default=",".join(NAMES), help="`--referee`: the servers [%(default)s]")
    parser.add_argument("--keep", type=Path, help="`--referee`: a folder for the files of each call")
    parser.add_argument("--calls", type=int, default=6, help="`--referee`: calls with each server")
    args = parser.parse_args()
    if args.referee:
        over = args.over.split(",")
        if unknown := set(over) - set(NAMES):
            parser.error(f"--over: there is no server {', '.join(sorted(unknown))}. It takes {', '.join(NAMES)}")
        print(f"\nwritten: {referee(args.referee, args.data, over, args.calls, args.keep)}")
        return
    if args.items:
        found = items(args.items, args.turn_detector)
        print(f"\nwritten: {save(f'turns-items-{args.items.name}', {'machine': machine(), 'items': found})}")
        return
    wanted = args.sections.split(",")
    if unknown := set(wanted) - set(SECTIONS):
        parser.error(f"--sections: there is no section {', '.join(sorted(unknown))}. It takes {', '.join(SECTIONS)}")
    if "full-duplex-bench" in wanted and args.out is None:
        parser.error("--sections full-duplex-bench needs --out FOLDER, the folder to write")
    for name in wanted:
        load_before = os.getloadavg()[0]
        found = (earlier(name) if name in ("barge-in", "sounds") else {}) | SECTIONS[name](args)
        document = {"machine": machine(), name: found}
        if name != "curve":
            loads = {"load_before": load_before, "load_after": os.getloadavg()[0], "niceness": os.nice(0)}
            document |= {"data": args.data.name} | loads
        print(f"\nwritten: {save(f'turns-{name}', document)}")


if __name__ == "__main__":
    main()
