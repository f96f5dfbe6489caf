"""How long a released checkpoint takes to load, beside `cat` of its files, and the memory above its weights.

    python -m bench.loading [--release qwen3-asr-1.7b] [--device cpu] [--rounds 3]

The release is written with small random values (tests/released/making.py) and deleted afterwards. Each load runs in a
process of its own, which has imported everything before. `ready`: the model is built. `read`: each weight was read once
too, because mapped weights are read from the disk when they are used. `cold`: the files are not in the page cache.
`copied`: `from_pretrained` of transformers alone, which copies each weight from the file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench.common import machine, options, save, table
from tests.released.making import write_release

from antiphon.released import releases

ROUNDS = 3
# Seconds between two looks at the memory.
LOOK_S = 0.01


def anonymous_bytes() -> int:
    """Return the memory of this process that is not a part of a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def parameters(parts: Any) -> list[torch.Tensor]:
    """Return all weights of a model or of the parts of one."""
    if isinstance(parts, torch.nn.Module):
        return list(parts.parameters())
    names = getattr(parts, "__slots__", ())
    return [weight for name in names for weight in parameters(getattr(parts, name))]


def load_once(folder: Path, model_type: str, device: str) -> dict[str, float]:
    """Load a folder in this process. Returns seconds and bytes."""
    from tests.released.test_loading import read_on

    # The context of a device is made before.
    torch.empty(1, device=device)
    before, peak, ended = anonymous_bytes(), [0], threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_S):
            peak[0] = max(peak[0], anonymous_bytes() - before)

    looking = threading.Thread(target=look)
    looking.start()
    began_s = time.perf_counter()
    loaded = read_on(torch.device(device), folder, model_type)
    ready_s = time.perf_counter() - began_s
    held = {weight.untyped_storage().data_ptr(): weight for weight in parameters(loaded)}
    for weight in held.values():
        weight.view(-1)[:: 4096 // weight.element_size()].sum().item()
    read_s = time.perf_counter() - began_s
    ended.set()
    looking.join()
    num_bytes = sum(weight.nbytes for weight in held.values())
    return {"ready_s": ready_s, "read_s": read_s, "anonymous_gb": peak[0] / 1e9, "weights_gb": num_bytes / 1e9}


def drop_cache(files: list[Path]) -> None:
    """Take files out of the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cat_s(files: list[Path]) -> float:
    began_s = time.perf_counter()
    subprocess.run(["cat", *map(str, files)], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began_s


def main() -> None:
    parser = options("loading", __doc__)
    parser.add_argument("--release", default="qwen3-asr-1.7b", choices=releases())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--once", type=Path, metavar="FOLDER", help="load it once in this process")
    args = parser.parse_args()
    release = releases()[args.release]
    if args.once:
        print(json.dumps(load_once(args.once, release.model_type, args.device)))
        return
    with tempfile.TemporaryDirectory(prefix="loading") as made:
        folder = write_release(Path(made) / "model", release, values=True)
        files = sorted(folder.rglob("*.safetensors"))
        size_gb = sum(path.stat().st_size for path in files) / 1e9
        rows = []
        for cold in (False, True):
            found = []
            for _ in range(args.rounds):
                if cold:
                    drop_cache(files)
                read_s = cat_s(files)
                if cold:
                    drop_cache(files)
                command = [sys.executable, "-m", "bench.loading", "--release", args.release, "--device", args.device]
                done = subprocess.run([*command, "--once", folder], capture_output=True, text=True, check=True)
                found.append(json.loads(done.stdout.splitlines()[-1]) | {"cat_s": read_s})
            row: dict[str, Any] = {name: median(one[name] for one in found) for name in found[0]}
            rows.append({"cache": "cold" if cold else "warm", "gb": size_gb} | row)
    head = list(rows[0])
    table(
        f"{args.release} on {args.device}", [*head, "read/cat"], [[*r.values(), r["read_s"] / r["cat_s"]] for r in rows]
    )
    save("loading", {f"{args.release} {args.device}": {"machine": machine(), "rows": rows}})


if __name__ == "__main__":
    main()
