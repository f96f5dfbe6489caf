"""A tiny MiniCPM-o whose sound tells which session, turn and code it belongs to, alone and on a server of its own.

    python -m tests.adapters.marked_minicpmo serve [flags of antiphon serve]

ANTIPHON_TEST_MODEL is the folder with the checkpoint of `tiny_minicpmo.write`. The server has scripted models for
everything else.
"""

from __future__ import annotations

import os
import sys
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from antiphon.adapters.minicpmo.model import MiniCpmO
from antiphon.adapters.spec import EngineModelOptions
from antiphon.audio import Pcm
from antiphon.audio.pcm import to_pcm16
from antiphon.audio.wav import wav_header
from antiphon.cli import preparation
from antiphon.cli.main import main
from antiphon.loading.loaded import LoadedModels
from antiphon.pipelines.native_conversation import NativeConversationModel
from antiphon.server import run
from tests.server.scripted import scripted_models

RATE_HZ, CODE_SAMPLES, LOOKAHEAD = 24_000, 960, 3
# A code's sound has a level for each digit, to this base: of the session, the turn (two) and the code (two).
BASE, DIGITS = 64, 5


@dataclass(frozen=True, slots=True)
class Mark:
    """What a code's sound tells: the session, its turn, and the number of codes of the turn before this one."""

    session: int
    turn: int
    code: int


def _level(digit: int) -> float:
    return (digit - BASE / 2) / 40


def _digit(pcm: Pcm) -> int:
    return round(float(np.median(pcm)) * 40 + BASE / 2)


def sound_of(mark: Mark) -> Pcm:
    """Return the sound of a code: float32 [960], 24 kHz."""
    digits = (mark.session, *divmod(mark.turn, BASE), *divmod(mark.code, BASE))
    return np.repeat(np.array([_level(digit) for digit in digits], np.float32), CODE_SAMPLES // DIGITS)


def marks_of(pcm: Pcm) -> list[Mark]:
    """Return the marks in float32 [num_samples], which has the sound of whole codes."""
    assert len(pcm) % CODE_SAMPLES == 0
    found = []
    for code in pcm.reshape(-1, DIGITS, CODE_SAMPLES // DIGITS):
        session, turn_high, turn_low, code_high, code_low = map(_digit, code)
        found.append(Mark(session, turn_high * BASE + turn_low, code_high * BASE + code_low))
    return found


def reference(session: int) -> str:
    """Return the reference voice that names a session, 0 to 63: a wave file in base64, for a session's `ref_audio`."""
    data = to_pcm16(np.full(16_000, _level(session), np.float32))
    return b64encode(wav_header(16_000, len(data)) + data).decode()


class MarkedVocoder:
    """A CodeVocoder that speaks marks. The reference voice names the session. A turn's first mark has code 0."""

    lookahead, room = LOOKAHEAD, BASE

    async def open(self, reference: Pcm | None) -> MarkedStream:
        return MarkedStream(_digit(reference) if reference is not None else 0)

    def close(self) -> None:
        pass


class MarkedStream:
    """The stream of one session of a MarkedVocoder. Turns are numbered from 1."""

    def __init__(self, session: int) -> None:
        self._next = Mark(session, 1, 0)

    async def decode(self, codes: Sequence[int], *, last: bool) -> Pcm:
        session, turn, code = self._next.session, self._next.turn, self._next.code
        count = len(codes) if last else len(codes) - LOOKAHEAD
        made = [sound_of(Mark(session, turn, code + n)) for n in range(count)]
        self._next = Mark(session, turn + 1, 0) if last else Mark(session, turn, code + count)
        return np.concatenate(made) if made else np.zeros(0, np.float32)

    def end_turn(self) -> None:
        self._next = Mark(self._next.session, self._next.turn + 1, 0)

    def close(self) -> None:
        pass


def marked(folder: Path, window: tuple[int, int] = (1600, 1200), options: EngineModelOptions | None = None) -> MiniCpmO:
    """Load the tiny checkpoint with the vocoder. The default window is scaled to the tiny model's 4,096 rows."""
    chosen = options or EngineModelOptions(weights="fp32", threads=1)
    return MiniCpmO(folder, "minicpmo-tiny", chosen, window=window, vocoder=MarkedVocoder())


def served(folder: Path, options: EngineModelOptions | None = None) -> LoadedModels:
    """Return the models of a server: the tiny model for conversations, and scripted ones."""
    return scripted_models(NativeConversationModel(marked(folder, options=options)))


if __name__ == "__main__":
    run.load = lambda *_: served(Path(os.environ["ANTIPHON_TEST_MODEL"]))  # type: ignore[assignment]
    # Model files are not checked, so they need not exist.
    preparation.require = lambda *_: None
    sys.exit(main([*sys.argv[1:], "--no-pull", "--profile", "light"]))
