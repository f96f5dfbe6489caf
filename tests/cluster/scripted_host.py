"""`antiphon serve` as a real process over scripted models: it starts in a second, and what it hears and says is known.

    python -m tests.cluster.scripted_host [flags of antiphon serve]

ANTIPHON_TEST_PACE_S: how long its model takes for each word, which is 0.3 s of audio. Asked to answer DEADLY, the
process ends at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from antiphon.cli.main import main
from antiphon.contracts import Message, ResponseChunk
from antiphon.server import run
from tests.server.scripted import Echo, scripted_models

DEADLY = "the words that end it"


class Mortal(Echo):
    """Repeats what it is told, but for DEADLY."""

    async def respond(self, messages: Sequence[Message], *options: Any) -> AsyncGenerator[ResponseChunk, None]:
        if messages[-1].text == DEADLY:
            os._exit(1)
        async for chunk in super().respond(messages, *options):
            yield chunk


if __name__ == "__main__":
    echo = Mortal(float(os.environ.get("ANTIPHON_TEST_PACE_S", "0")))
    run.load = lambda *_: scripted_models(echo)  # type: ignore[assignment]
    # No file of a model is looked for.
    sys.exit(main(["serve", "--no-pull", "--profile", "light", *sys.argv[1:]]))
