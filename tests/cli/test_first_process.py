"""Commands as a container's first process: SIGTERM ends them."""

from __future__ import annotations

import signal
import subprocess
import sys

PROGRAM = """
import os, signal, time
own, os.getpid = os.getpid(), lambda: 1
from antiphon.cli.main import main
try:
    main(["--version"])
except SystemExit:
    pass
os.kill(own, signal.SIGTERM)
time.sleep(30)
"""


def test_when_it_is_the_first_process_then_sigterm_ends_it_before_anything_is_served() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], timeout=60, check=False)
    # The exit status that a shell would report. Without its own handler, the signal would have killed the process.
    assert done.returncode == 128 + signal.SIGTERM
