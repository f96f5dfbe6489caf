"""Third-party clients, each in an environment of its own, against a real server: `make clients`.

    python tests/clients/run.py [NAME…]

An environment is made beside this file from NAME.txt on the first run. A driver prints one line and exits with 0 if its client was served.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = ("agents", "livekit", "pipecat")
LIMIT_S = 180
RECORDING = HERE.parent / "data" / "audio"


def environment(name: str, here: Path = HERE) -> Path:
    """The interpreter of a client's environment in `here`; made where its list is new."""
    listed = here / f"{name}.txt"
    folder = here / f".venv-{name}"
    digest = hashlib.sha256(listed.read_bytes()).hexdigest()
    stamp = folder / ".done"
    if not stamp.is_file() or stamp.read_text() != digest:
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([folder / "bin" / "pip", "install", "-q", "-r", listed], check=True)
        stamp.write_text(digest)
    return folder / "bin" / "python"


@contextmanager
def server() -> Iterator[str]:
    """A server of the default models; gives its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "antiphon", "serve", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
    )
    try:
        assert process.stdout
        yield next(found[1] for line in process.stdout if (found := re.search(r"ready at (\S+)", line)))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def main() -> int:
    names = sys.argv[1:] or NAMES
    pythons = {name: environment(name) for name in names}
    recording = next(p for p in sorted(RECORDING.iterdir()) if p.name.startswith("lj-LJ001-0008"))
    failed = 0
    with server() as url:
        for name, python in pythons.items():
            try:
                done = subprocess.run([python, HERE / f"drive_{name}.py", url, recording], timeout=LIMIT_S, check=False)
                code = done.returncode
            except subprocess.TimeoutExpired:
                code = 124
            print(f"{name}: {'served' if code == 0 else f'FAILED ({code})'}", flush=True)
            failed += code != 0
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
