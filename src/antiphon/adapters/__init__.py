"""Adapters, one folder each: an adapter loads a kind of checkpoint and fits it to a contract of `contracts/`.

No adapter imports another. Shared parts are in `modeling/`. Each folder exports a `SPEC` (`spec.py`), which describes
the adapter to the loader, and has a line in ADAPTERS. A new model takes one folder and one line (docs/add-a-model.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from antiphon.adapters.spec import Spec

# The folder names of the adapters, as `adapter` in store/registry.py uses them. The order matters: a checkpoint whose
# `model_type` no adapter lists goes to the first adapter of the role that loads folders.
ADAPTERS = (
    "whisper",
    "qwen3_asr",
    "silero",
    "smart_turn",
    "resemblyzer",
    "qwen3_tts",
    "hibari",
    "causal_lm",
    "vlm",
    "minicpmo",
    "qwen3_omni",
    "qwen2_5_omni",
    "rapid_ocr",
    "espeak_ng",
)
SPECS: Mapping[str, Spec] = MappingProxyType({name: import_module(f"{__name__}.{name}").SPEC for name in ADAPTERS})
