"""Runs `antiphon` with a small voice that accepts samples to clone: python -m bench.hostile.cloning serve ...

The voice fetches, decodes and limits the samples like any cloning voice, but speaks with its own sound. A real cloning
model takes tens of seconds for a sentence on a benchmark's cores.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from antiphon.adapters.hibari.synthesizer import Hibari
from antiphon.cli.main import main

made = Hibari.__init__


def make(self: Hibari, *args: Any, **options: Any) -> None:
    made(self, *args, **options)
    self.profile = replace(self.profile, clones_voices=True)


if __name__ == "__main__":
    Hibari.__init__ = make  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
