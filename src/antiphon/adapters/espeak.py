"""Runs the program eSpeak NG. Shared by the fallback voice, which it is, and by voices that need its phonemes.

It is run as a process and not linked, because its licence is the GPL.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

from antiphon.errors import ModelError

PROGRAM = "espeak-ng"
# Timeout in seconds of one run of the program, which reads one sentence.
LIMIT_S = 30.0


def require_espeak() -> None:
    """Raise ModelError, which says how to install the program, if it is not on the PATH."""
    if shutil.which(PROGRAM) is None:
        raise ModelError(f"{PROGRAM} is not installed (apt install {PROGRAM})")


def run_espeak(arguments: Sequence[str], text: str) -> bytes:
    """Run the program on a text, which it reads from its standard input, and return what it writes.

    Raises ModelError if it fails, is not installed or takes longer than LIMIT_S.
    """
    data = text.encode(errors="replace")
    try:
        done = subprocess.run([PROGRAM, *arguments], input=data, capture_output=True, timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelError(f"{PROGRAM} failed: {error}") from None
    if done.returncode:
        raise ModelError(f"{PROGRAM} failed: {done.stderr.decode(errors='replace').strip()[:200]}")
    return done.stdout
