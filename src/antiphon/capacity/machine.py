"""What a certificate says of the machine it is of."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Return the CPU, the cores that this process may use, memory in GB, and the GPUs by name."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpus": _gpus(),
        "python": platform.python_version(),
    }


def differs(certified: dict[str, Any]) -> list[str]:
    """Return what of this machine is another than was certified, of CPU, cores and GPUs."""
    if not certified:
        return []
    here = machine()
    return [name for name in ("cpu", "cores", "gpus") if name in certified and certified[name] != here[name]]


def _cpu() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
