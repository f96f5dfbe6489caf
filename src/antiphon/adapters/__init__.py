"""One folder for each kind of model: what loads its checkpoint and makes it fit a contract of `contracts/`.

No adapter imports another; parts that several share are in `modeling/`. `ADAPTERS` says which class loads which
checkpoint, so that a new model is one folder and one line here (docs/add-a-model.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Adapter name of store/registry.py -> "module:Class", called as Class(folder, model_id, **options).
# The modules are named and not imported: each imports libraries that take seconds and may not be installed.
ADAPTERS: Mapping[str, str] = MappingProxyType(
    {
        "whisper": "antiphon.adapters.whisper.transcriber:WhisperTranscriber",
        "qwen3_asr": "antiphon.adapters.qwen3_asr:Qwen3Asr",
        "silero": "antiphon.adapters.silero.detector:SileroDetector",
        "smart_turn": "antiphon.adapters.smart_turn.turn_detector:SmartTurn",
        "qwen3_tts": "antiphon.adapters.qwen3_tts:Qwen3Tts",
        "hibari": "antiphon.adapters.hibari.synthesizer:Hibari",
        "causal_lm": "antiphon.adapters.causal_lm.model:CausalLm",
        "vlm": "antiphon.adapters.vlm:VisionLanguageModel",
        "minicpmo": "antiphon.adapters.minicpmo.model:MiniCpmO",
        "qwen3_omni": "antiphon.adapters.qwen3_omni:Qwen3Omni",
    }
)

# Adapters whose files are converted once before they are loaded -> "module:function", called as
# function(source, home, name, weights, device), which returns the folder to load.
PREPARERS: Mapping[str, str] = MappingProxyType({"causal_lm": "antiphon.adapters.causal_lm.checkpoint:prepare"})
