"""When turns end: how often a pause inside a turn ends it, and how long its true end waits.

    antiphon bench turns [--sections curve]

- `curve`: silence alone, Smart Turn alone, and the end-of-turn model, over the pauses of bench/results/
  turns-pauses.json, of speakers that the model was never fitted to. Without a server and without audio;
  bench/turn_taking/pauses.py makes that file, and bench/turn_taking/fit.py fits the model to it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.common import RESULTS, machine, save
from bench.turn_taking.curve import curve, plot

SECTIONS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"curve": lambda args: curve(args.words_ms)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="antiphon bench turns", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--words-ms", type=float, default=400, help="`curve`: the silence at which the words are known")
    args = parser.parse_args()
    wanted = args.sections.split(",")
    if unknown := set(wanted) - set(SECTIONS):
        parser.error(f"--sections: there is no section {', '.join(sorted(unknown))}. It takes {', '.join(SECTIONS)}")
    for name, section in SECTIONS.items():
        if name in wanted:
            document = {"machine": machine(), name: section(args)}
            # A section that was measured stays, whatever the next one does.
            path = save(f"turns-{name}", document)
            if name == "curve":
                plot(document, RESULTS)
            print(f"\nwritten: {path}")


if __name__ == "__main__":
    main()
