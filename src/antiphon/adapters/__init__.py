"""One folder for each kind of model: what loads its checkpoint and makes it fit a contract of `contracts/`.

No adapter imports another; parts that several share are in `modeling/`. A folder exports a `SPEC` (`spec.py`), by which
the loader knows it, and has a line in the table here, so that a new model is one folder and one line
(docs/add-a-model.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from antiphon.adapters.spec import Spec

# The adapters, a folder each. Their names are those of `adapter` in store/registry.py. The first one of a role that
# loads checkpoints from folders is given those whose type none names.
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
