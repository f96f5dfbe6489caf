"""Qwen3-Omni-30B-A3B.

On a CPU its 35 billion parameters have no room: there all layers of a decoder share the experts of one. What a step
reads and multiplies is the same.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from bench.models.weights import filled, made_tokenizer, write_tokenizer
from tests.adapters import tiny_qwen3_omni as tiny
from tokenizers import AddedToken, Tokenizer
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration, WhisperFeatureExtractor

from antiphon.adapters.qwen3_omni.checkpoint import parts_of
from antiphon.adapters.qwen3_omni.model import Qwen3Omni
from antiphon.adapters.spec import EngineModelOptions
from antiphon.engine.local.weights import weights_for
from antiphon.modeling.omni.conversation import tokenizer

ROPE = {"rope_type": "default", "rope_theta": 1_000_000.0}
SECTIONS = ROPE | {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
FRAME_SAMPLES = {"tiny": tiny.FRAME_SAMPLES, "30B-A3B": 1920}
VOICE = "ethan"


def dimensions(ids: dict[str, int]) -> Any:
    """Qwen/Qwen3-Omni-30B-A3B-Instruct, config.json; `ids` of the control tokens are the tokenizer's here."""
    places = {n: ids[f"<|{n[:5]}_pad|>"] for n in ("audio_token_id", "image_token_id", "video_token_id")}
    starts = {"vision_start_token_id": ids["<|vision_start|>"], "audio_start_token_id": ids["<|audio_start|>"]}
    thinker = (
        {
            "text_config": {
                "vocab_size": 152064,
                "hidden_size": 2048,
                "intermediate_size": 768,
                "num_hidden_layers": 48,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "head_dim": 128,
                "max_position_embeddings": 65536,
                "rope_parameters": SECTIONS,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
            },
            "audio_config": {"output_dim": 2048},
            "vision_config": {"out_hidden_size": 2048},
            "user_token_id": ids["user"],
        }
        | places
        | starts
    )
    talker = (
        {
            "text_config": {
                "vocab_size": 3072,
                "hidden_size": 1024,
                "intermediate_size": 2048,
                "num_hidden_layers": 20,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "head_dim": 128,
                "max_position_embeddings": 65536,
                "rope_parameters": SECTIONS,
                "num_experts": 128,
                "num_experts_per_tok": 6,
                "moe_intermediate_size": 384,
                "shared_expert_intermediate_size": 768,
            },
            "code_predictor_config": {"num_code_groups": 16, "rope_parameters": ROPE},
            "num_code_groups": 16,
            "codec_eos_token_id": 2150,
            "codec_nothink_id": 2155,
            "codec_think_bos_id": 2156,
            "codec_think_eos_id": 2157,
            "codec_pad_id": 2148,
            "codec_bos_id": 2149,
            "speaker_id": {"ethan": 2302},
            "spatial_merge_size": 2,
        }
        | places
        | starts
    )
    named = {"im_start": "<|im_start|>", "im_end": "<|im_end|>", "tts_pad": "<tts_pad>", "tts_bos": "<tts_text_bos>"}
    named |= {"tts_eos": "<tts_text_eod>", "system": "system", "user": "user", "assistant": "assistant"}
    more = {f"{name}_token_id": ids[text] for name, text in named.items()}
    sound = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    return Qwen3OmniMoeConfig(thinker_config=thinker, talker_config=talker, code2wav_config=sound, **more)


def conversation_model(size: str, options: EngineModelOptions, words: Tokenizer | None = None) -> Qwen3Omni:
    """Return the model: "tiny" or "30B-A3B". `words`: a tokenizer of its family; None: one that is made here."""
    torch.manual_seed(0)
    where, dtype = torch.device(options.device), weights_for(options.device, options.weights, mixture=True)[1]
    if words is None:
        words = made_tokenizer(tiny.SPECIAL, tiny.WORDS, trained=size != "tiny")
    else:
        words.add_special_tokens(tiny.SPECIAL)
        words.add_tokens([AddedToken(word, normalized=False) for word in tiny.WORDS])
    ids = {text: words.token_to_id(text) for text in (*tiny.SPECIAL, *tiny.WORDS)}
    config = tiny.config() if size == "tiny" else dimensions(ids)
    with init_empty_weights(include_buffers=False):
        whole: Any = Qwen3OmniMoeForConditionalGeneration(config)
    if options.device == "cpu":
        for layers in (whole.thinker.get_decoder().layers, whole.talker.model.layers):
            share_experts(list(layers), where, dtype)
    filled(whole, where, dtype)
    with torch.no_grad():
        # A trained model says no control tokens between words; one of random weights would.
        whole.thinker.lm_head.weight[[ids[text] for text in tiny.SPECIAL]] = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(words, folder, "<|im_end|>")
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": tiny.TEMPLATE}))
        audio, vision = config.thinker_config.audio_config, config.thinker_config.vision_config
        WhisperFeatureExtractor(feature_size=audio.num_mel_bins).save_pretrained(folder)
        facts = json.loads((folder / "preprocessor_config.json").read_text())
        facts |= {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": vision.patch_size, "merge_size": 2}
        (folder / "preprocessor_config.json").write_text(json.dumps(facts))
        return Qwen3Omni(folder, f"qwen3-omni-{size.lower()}", options, parts=parts_of(whole, tokenizer(folder)))


def share_experts(layers: list[Any], where: torch.device, dtype: torch.dtype) -> None:
    """Give all layers the experts of the first."""
    first = layers[0].mlp.experts
    filled(first, where, dtype)
    for layer in layers[1:]:
        layer.mlp.experts = first
