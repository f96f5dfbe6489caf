"""Models: how each listens, answers or speaks. `ADAPTERS` is the table; a new model is one file and one line here (docs/add-a-model.md)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# adapter name of store/registry.py -> "module:Class", called as Class(folder, model_id, **options)
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

# adapters whose files are made ready once -> "module:function", called as function(source, home, name, weights, device) -> folder
PREPARERS: Mapping[str, str] = MappingProxyType({"causal_lm": "antiphon.adapters.causal_lm.checkpoint:prepare"})
