"""Size of each extra, and time to its first answer: `python -m bench.packages [--python python3.12 ...] [--cold]`.

A wheel is built from this checkout. Each of the Pythons installs it, with the versions of the lock file, into a new
environment for each extra. The environment's server starts (`--profile light`) and gets one request. Without extras, it
transcribes a recording. With `speech`, it speaks a sentence. With any other extra, it answers a typed sentence by
voice. The time to the answer counts from the start of `pip install`. Models are cached; with `--cold`, each server
fetches them again. Sizes are those of the files in the environment's site-packages.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from bench.common import HERE, machine, options, save, show

from antiphon.client import AudioToPlay, Client

ROOT = HERE.parent
BUILD = ROOT / "build" / "packages"
EXTRAS = ("", "speech", "talk", "all")


def wheel() -> Path:
    """Build the wheel of the checkout."""
    shutil.rmtree(BUILD, ignore_errors=True)
    # Removes the build output that setuptools leaves next to the source, because it would be packaged again.
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", BUILD, ROOT], check=True)
    return next(BUILD.glob("antiphon-*.whl"))


def installed(python: str, extra: str, package: Path) -> tuple[Path, float]:
    """Install the wheel with an extra. Return its environment, and the size of its packages in MB."""
    place = BUILD / f"{Path(python).name}-{extra or 'base'}"
    subprocess.run([python, "-m", "venv", str(place)], check=True)
    inside = str(place / "bin" / "python")
    subprocess.run([inside, str(ROOT / "deploy" / "lock.py"), "install", extra], check=True)
    subprocess.run([inside, "-m", "pip", "install", "-q", "--no-deps", str(package)], check=True)
    packages = next((place / "lib").glob("python*/site-packages"))
    return place, sum(file.stat().st_size for file in packages.rglob("*") if file.is_file()) / 1e6


def first_answer(place: Path, extra: str, home: str) -> tuple[float, str]:
    """Start the environment's server, and send one request. Return the seconds until it was ready, and its answer."""
    begun = time.monotonic()
    flags = ["--port", "0", "--home", home, *(["--profile", "light"] if extra in ("talk", "all") else [])]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ANTIPHON_") and k != "PYTHONPATH"}
    with subprocess.Popen(
        [str(place / "bin" / "antiphon"), "serve", *flags], stdout=subprocess.PIPE, text=True, env=environment, cwd="/"
    ) as server:
        try:
            assert server.stdout
            url = next(found[1] for line in server.stdout if (found := re.search(r"ready at (\S+)", line)))
            ready_s = time.monotonic() - begun
            return ready_s, asyncio.run(_asked(url, extra))
        finally:
            server.terminate()


async def _asked(url: str, extra: str) -> str:
    if not extra:
        async with Client(url) as client:
            return await client.transcribe(str(ROOT / "tests/data/audio/jfk.flac"))
    if extra == "speech":
        body = {"model": "default", "input": "This is a test.", "voice": "heart", "response_format": "pcm"}
        async with httpx.AsyncClient(timeout=60) as http:
            return f"{len((await http.post(f'{url}/v1/audio/speech', json=body)).content)} bytes of audio"
    async with Client(url) as client, client.conversation() as talk:
        await talk.send_text("What is the capital of France?")
        async for event in talk:
            if isinstance(event, AudioToPlay):
                return f"{len(event.pcm)} bytes of audio"
    raise RuntimeError("the conversation ended without an answer")


def measured(python: str, extra: str, package: Path, home: str) -> dict[str, Any]:
    """Install one extra, send its server a request, and return the figures."""
    begun = time.monotonic()
    place, size_mb = installed(python, extra, package)
    install_s = time.monotonic() - begun
    ready_s, answer = first_answer(place, extra, home)
    row = {
        "python": Path(python).name,
        "extra": extra,
        "size_mb": round(size_mb),
        "install_s": round(install_s, 1),
        "ready_s": round(ready_s, 1),
        "first_answer_s": round(time.monotonic() - begun, 1),
        "answer": answer,
    }
    shutil.rmtree(place)
    print(row, flush=True)
    return row


def main() -> None:
    """Measure, print a table and write bench/results/packages.json."""
    parser = options("python -m bench.packages", __doc__)
    parser.add_argument("--python", nargs="+", default=["python3"])
    parser.add_argument("--extras", nargs="+", default=[e or "base" for e in EXTRAS])
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    package, rows = wheel(), list[dict[str, Any]]()
    for python in args.python:
        for extra in (e.replace("base", "") for e in args.extras):
            home = str(BUILD / f"home-{extra}") if args.cold else str(Path("~/.cache/antiphon").expanduser())
            rows.append(measured(python, extra, package, home))
    show(f"installed size, and the time to a first answer, models {'fetched' if args.cold else 'cached'}", rows)
    save("packages-cold" if args.cold else "packages", {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
