"""Grammars of random schemas, made as the product makes them, in a process that may be ended: python -m
tests.fuzz.grammars

It reads a schema a line, as JSON in a JSON string, and answers each with a line: why it is refused, or nothing. A
schema that takes longer than DEADLINE_S, or more memory than MEMORY_BYTES, is a find.
"""

from __future__ import annotations

import atexit
import json
import resource
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from antiphon.engine.api import Grammar
from antiphon.engine.grammar import check_grammar
from antiphon.errors import AntiphonError

# The product ends a grammar after seconds; a machine with more to do takes longer for the same.
DEADLINE_S, MEMORY_BYTES = 60.0, 3 << 30


class Checker:
    """The process, which is made anew where it was ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self.end)

    def end(self) -> None:
        """End the process."""
        if self._process:
            with self._process as process:
                process.kill()
            self._process = None

    def check(self, schema: str | bytes) -> str:
        """Why a schema is refused; empty where it is not. Raises AssertionError for one that does not hold."""
        text = schema if isinstance(schema, str) else schema.decode(errors="replace")
        if self._process is None:
            command = [sys.executable, "-m", "tests.fuzz.grammars"]
            root = Path(__file__).parents[2]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
            )
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(text) + "\n")
        self._process.stdin.flush()
        answered, _, _ = select.select([self._process.stdout], [], [], DEADLINE_S)
        line = self._process.stdout.readline() if answered else ""
        if not line:
            self.end()
            raise AssertionError("its process has ended" if answered else f"it takes longer than {DEADLINE_S:.0f} s")
        answer = json.loads(line)
        assert answer["held"], answer["why"]
        return str(answer["why"])


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin:
        answer = {"held": True, "why": ""}
        try:
            check_grammar(Grammar("json_schema", json.loads(line)))
        except AntiphonError as error:
            answer["why"] = str(error)
        except BaseException as error:
            answer = {"held": False, "why": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
