"""Play scenarios in this process: `python -m tests.traces.play FOLDER [NAME ...]`.

Writes FOLDER/NAME.jsonl for each scenario, and FOLDER/NAME.error if the scenario raises an error.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from tests.traces import clock


def main(folder: Path, names: list[str]) -> None:
    clock.install()
    # The clocks are replaced now, so the server may be imported.
    from tests.traces import scenarios  # noqa: F401 (they register themselves)
    from tests.traces.harness import SCENARIOS, Trace

    for name, play in SCENARIOS.items():
        if names and name not in names:
            continue
        trace = Trace()
        try:
            clock.run(play(trace))
        except Exception:
            (folder / f"{name}.error").write_text(traceback.format_exc(), encoding="utf-8")
        (folder / f"{name}.jsonl").write_text(trace.text(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
