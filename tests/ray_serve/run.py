"""antiphon on a real Ray Serve, with real clients: `make ray`.

    python tests/ray_serve/run.py [CHECK…]

Makes an environment with Ray (0.4 GB) beside the project's, and runs `checks.py` in it. Each line is something that
callers did and got.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.clients.run import environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main() -> int:
    python = environment("ray", HERE)
    # Ray's own packages come first, and then whatever the project has.
    (folder,) = (python.parents[1] / "lib").glob("python3*/site-packages")
    paths = [*site.getsitepackages(), str(ROOT), str(ROOT / "src")]
    (folder / "project.pth").write_text("\n".join(paths) + "\n")
    # Tests decide what hosts admit; Ray's processes start with this environment.
    variables = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "ANTIPHON_HEADROOM": "true"}
    return subprocess.run(
        [python, "-P", "-m", "tests.ray_serve.checks", *sys.argv[1:]], cwd=ROOT, env=variables
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
