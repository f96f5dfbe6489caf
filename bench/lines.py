"""Counts the lines of code of three programs, written with our client and with other libraries.

    python -m bench.lines [--url http://127.0.0.1:8000]

The programs are in bench/programs: captions of a recording, an agent with a tool, and a narrator that gets its text in
pieces. Each runs in the environment of `make clients`, against a server with the default models at that URL. It has to
produce its result: the words of the recording, an answer with the tool's result, or two seconds of speech. Then its
lines are counted without blank lines and comments, and its imports separately.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import wave
from pathlib import Path

import httpx
from bench.common import machine, options, save, table
from tests.clients.run import environment

PROGRAMS = Path(__file__).resolve().parent / "programs"
TASKS = ("captions", "agent", "narrator")
# Each library with its environment; "" is the project's own.
CLIENTS = {"antiphon": "", "openai": "agents", "livekit": "livekit", "pipecat": "pipecat"}
SAID = "Welcome to the meeting. The first point is the budget."
LIMIT_S, TRIES = 120, 3


def lines(program: Path) -> tuple[int, int]:
    """Return the lines of a program without blank lines, comments and imports, and the number of its imports."""
    source = program.read_text(encoding="utf-8")
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {line for node in imports for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    code = [n for n, line in enumerate(source.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")]
    return len([n for n in code if n not in imported]), len(imports)


def works(task: str, name: str, url: str, folder: Path) -> bool:
    """Run a program, and return whether it produced its result."""
    python = environment(CLIENTS[name]) if CLIENTS[name] else Path(sys.executable)
    source = (PROGRAMS / f"{task}_{name}.py").read_text(encoding="utf-8")
    program = folder / "program.py"
    program.write_text(source.replace("127.0.0.1:8000", url.partition("//")[2]), encoding="utf-8")
    (folder / "story.wav").unlink(missing_ok=True)
    command = ["timeout", str(LIMIT_S), python, program]
    reported = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if reported.returncode:
        print(reported.stderr[-500:], file=sys.stderr)
        return False
    if task == "captions":
        return "meeting" in reported.stdout and "budget" in reported.stdout
    if task == "agent":
        return "17" in reported.stdout
    with wave.open(str(folder / "story.wav")) as file:
        return file.getnframes() > 2 * file.getframerate()


def main() -> None:
    parser = options("python -m bench.lines", __doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of a server with the default models")
    url = parser.parse_args().url
    found: dict[str, dict[str, dict[str, int]]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        body = {"model": "default", "voice": "heart", "input": SAID, "response_format": "wav"}
        (folder / "speech.wav").write_bytes(httpx.post(f"{url}/v1/audio/speech", json=body).content)
        for task in TASKS:
            for name in CLIENTS:
                # A small model does not always call its tool.
                assert any(works(task, name, url, folder) for _ in range(TRIES)), f"{task} with {name} does not work"
                code, imports = lines(PROGRAMS / f"{task}_{name}.py")
                found.setdefault(name, {})[task] = {"code": code, "imports": imports}
    rows = [(name, *(f"{of[task]['code']} + {of[task]['imports']}" for task in TASKS)) for name, of in found.items()]
    table("lines of code + imports", ("", *TASKS), rows)
    print(f"written: {save('lines', {'machine': machine(), 'lines': found})}")


if __name__ == "__main__":
    main()
