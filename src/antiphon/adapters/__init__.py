"""The adapters. Each is a folder that loads one kind of checkpoint and implements a contract of `contracts/` with it.

No adapter imports another. Shared parts are in `modeling/`. Each folder exports a `SPEC` (`spec.py`), which describes
the adapter to the loader, and has a line in ADAPTERS. A new model takes one folder and one line (docs/add-a-model.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from antiphon.adapters.spec import Spec

# The folder names of the adapters, which are the values of `adapter` in store/registry.py. The order matters: if no
# adapter lists the `model_type` of a checkpoint, the first adapter of the role that loads folders loads it.
ADAPTERS = (
    "whisper",
    "qwen3_asr",
    "silero",
    "smart_turn",
    "turn_stream",
    "encoder_head",
    "turn_words",
    "sound_backchannel",
    "resemblyzer",
    "campplus",
    "qwen3_tts",
    "hibari",
    "piper",
    "causal_lm",
    "vlm",
    "minicpmo",
    "qwen3_omni",
    "qwen2_5_omni",
    "rapid_ocr",
    "espeak_ng",
)
SPECS: Mapping[str, Spec] = MappingProxyType({name: import_module(f"{__name__}.{name}").SPEC for name in ADAPTERS})
