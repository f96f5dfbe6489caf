"""A PyTorch image with bench/gpu-requirements.txt is enough for the engine, the torch models and the server.

All modules are imported with the oldest supported `transformers`, and without the dependencies that neither the image
nor the file has. NEED_MORE lists the modules that cannot be imported this way. Other modules import these dependencies
only when they use them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OLDEST = ROOT / "build" / "oldest-transformers"
# Dependencies that an image with PyTorch, transformers and ONNX Runtime already has.
IMAGE = {
    "accelerate",
    "anyio",
    "httpx",
    "httpcore",
    "huggingface-hub",
    "jinja2",
    "numpy",
    "onnx",
    "onnxruntime",
    "pillow",
    "pip",
    "prometheus-client",
    "pyyaml",
    "rich",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
}
# All other dependencies, under the names by which they are imported.
MISSING = {
    "aiortc": "aiortc",
    "av": "av",
    "ctranslate2": "ctranslate2",
    "faster-whisper": "faster_whisper",
    "gguf": "gguf",
    "hibari-tts": "hibari",
    "py3langid": "py3langid",
    "rapidocr": "rapidocr",
}
NEED_MORE = {
    "antiphon.adapters.encoder_head.turn_detector",
    "antiphon.adapters.hibari.synthesizer",
    "antiphon.adapters.smart_turn.turn_detector",
    "antiphon.adapters.whisper.decoder",
    "antiphon.adapters.whisper.files",
    "antiphon.adapters.whisper.outputs",
    "antiphon.adapters.whisper.transcriber",
    "antiphon.audio.ffmpeg_encoder",
    "antiphon.audio.stretch",
    "antiphon.cli.doctor",
    "antiphon.cli.watch",
    # Ray is an extra.
    "antiphon.cluster.ray_app",
    "antiphon.modeling.sound.turn_features",
    # Triton is only in CUDA builds of torch.
    "antiphon.engine.local.kernels.paged",
    "antiphon.transports.webrtc",
}
IMPORT_ALL = """
import importlib, pkgutil, sys

for name in sys.argv[1:]:
    sys.modules[name] = None  # the import system takes it for a module that is not there
import antiphon

for module in pkgutil.walk_packages(antiphon.__path__, "antiphon."):
    if module.name != "antiphon.__main__":
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError:
            print(module.name)
"""


def _names(lines: list[str]) -> set[str]:
    """Return the names of the distributions in requirement lines."""
    found = (re.match(r"[A-Za-z0-9-]+", line) for line in lines)
    return {match[0] for match in found if match}


def test_the_image_and_the_file_have_all_dependencies_but_these() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    carried = (ROOT / "bench" / "gpu-requirements.txt").read_text(encoding="utf-8").splitlines()
    # A GPU machine does not need the packages for terminals.
    extras = project["optional-dependencies"]
    everything = [
        *project["dependencies"],
        *(line for e in ("speech", "talk", "video", "webrtc") for line in extras[e]),
    ]
    assert _names(everything) - {"antiphon"} == IMAGE | set(MISSING) | _names(carried)
    lock = re.findall(r"^[a-z0-9-]+==[^ ]+", (ROOT / "requirements.lock").read_text(encoding="utf-8"), re.MULTILINE)
    assert {line for line in carried if not line.startswith("#")} <= set(lock)


@pytest.mark.server
def test_the_package_imports_without_the_others() -> None:
    if not OLDEST.is_dir():
        pytest.fail("there is no build/oldest-transformers: make build/oldest-transformers.stamp")
    path = os.pathsep.join([str(OLDEST), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *MISSING.values(), "triton"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert set(run.stdout.split()) == NEED_MORE
