"""`antiphon` whose small voice takes the samples of a voice that clones: python -m bench.hostile.cloning serve ...

It fetches, decodes and bounds them as with any such voice, and speaks with its own: a model that clones needs tens of
seconds for a sentence on the cores of a benchmark.
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
