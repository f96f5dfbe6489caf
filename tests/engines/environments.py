"""The environments and ports of the other servers."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

from tests.clients.run import environment

HERE = Path(__file__).resolve().parent


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def with_vllm(name: str) -> Path:
    """The interpreter of an environment with vLLM for CPUs, without what is only for GPUs."""
    python = environment(name, HERE)
    wrong = ["torchvision", "torchaudio", "torchcodec"]
    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *wrong], check=True, stderr=subprocess.DEVNULL)
    return python
