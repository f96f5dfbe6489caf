"""A Qwen3-Omni with tiny random weights, in the layout of `transformers`, with the files of the released folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
    WhisperFeatureExtractor,
)

# The ids of the control tokens begin here.
FIRST = 256
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tool_call>",
    "</tool_call>",
    "<|endoftext|>",
]
# Words that are one token each, as in the released tokenizer. They identify the role of a turn.
WORDS = ["system", "user", "assistant"]
ID = {text: FIRST + i for i, text in enumerate([*SPECIAL, *WORDS])}
CODES, GROUPS = 40, 4
FRAME_SAMPLES = 32
# In the released folder, the template is next to the tokenizer.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif c.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SECTIONS = ROPE | {"mrope_section": [2, 3, 3], "interleaved": True, "mrope_interleaved": True}


def config() -> Any:
    """Return a small configuration of the whole model, with all parts."""
    text = {
        "vocab_size": FIRST + len(SPECIAL) + len(WORDS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rope_parameters": SECTIONS,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "initializer_range": 0.25,
    }
    ids = {
        "audio_token_id": ID["<|audio_pad|>"],
        "image_token_id": ID["<|image_pad|>"],
        "video_token_id": ID["<|video_pad|>"],
    }
    starts = {"vision_start_token_id": ID["<|vision_start|>"], "audio_start_token_id": ID["<|audio_start|>"]}
    thinker = (
        {
            "text_config": text,
            "audio_config": {
                "num_mel_bins": 16,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
                "d_model": 32,
                "output_dim": 64,
                "n_window": 50,
                "n_window_infer": 800,
                "downsample_hidden_size": 8,
                "initializer_range": 0.25,
            },
            "vision_config": {
                "depth": 3,
                "hidden_size": 32,
                "num_heads": 2,
                "intermediate_size": 48,
                "patch_size": 8,
                "out_hidden_size": 64,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1],
                "initializer_range": 0.25,
            },
            "user_token_id": ID["user"],
            "position_id_per_seconds": 13,
            "initializer_range": 0.25,
        }
        | ids
        | starts
    )
    talker = (
        {
            "text_config": {
                "vocab_size": CODES + 1024,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "max_position_embeddings": 2048,
                "rope_parameters": SECTIONS,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "shared_expert_intermediate_size": 24,
                "initializer_range": 0.25,
            },
            "code_predictor_config": {
                "vocab_size": CODES,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "num_code_groups": GROUPS,
                "rope_parameters": ROPE,
                "initializer_range": 0.25,
            },
            "num_code_groups": GROUPS,
            "thinker_hidden_size": 64,
            "accept_hidden_layer": 3,
            "codec_eos_token_id": CODES + 1,
            "codec_nothink_id": CODES + 2,
            "codec_think_bos_id": CODES + 3,
            "codec_think_eos_id": CODES + 4,
            "codec_pad_id": CODES + 5,
            "codec_bos_id": CODES + 6,
            "speaker_id": {"ethan": CODES + 10, "chelsie": CODES + 11},
            "spatial_merge_size": 2,
            "position_id_per_seconds": 13,
            "initializer_range": 0.25,
        }
        | ids
        | starts
    )
    sound = {
        "codebook_size": CODES,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "sliding_window": 6,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_quantizers": GROUPS,
        "upsample_rates": [4, 2],
        "upsampling_ratios": [2, 2],
        "decoder_dim": 16,
        "rope_parameters": ROPE,
        "initializer_range": 0.25,
        "layer_scale_initial_scale": 0.5,
    }
    return Qwen3OmniMoeConfig(
        thinker_config=thinker,
        talker_config=talker,
        code2wav_config=sound,
        im_start_token_id=ID["<|im_start|>"],
        im_end_token_id=ID["<|im_end|>"],
        tts_pad_token_id=ID["<tts_pad>"],
        tts_bos_token_id=ID["<tts_text_bos>"],
        tts_eos_token_id=ID["<tts_text_eod>"],
        system_token_id=ID["system"],
        user_token_id=ID["user"],
        assistant_token_id=ID["assistant"],
        initializer_range=0.25,
    )


def write_tokenizer(where: Path, special: list[str], template: str) -> None:
    """Write a tokenizer of bytes, control tokens and WORDS, and a file with the chat template next to it."""
    words = Tokenizer(BPE(vocab={c: i for i, c in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(special)
    words.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.save_pretrained(where)
    (where / "chat_template.json").write_text(json.dumps({"chat_template": template}))


def write(where: Path) -> Path:
    """Write the checkpoint into an existing folder, and return the folder."""
    write_tokenizer(where, SPECIAL, TEMPLATE)
    torch.manual_seed(5)
    model: Any = Qwen3OmniMoeForConditionalGeneration(config())
    with torch.no_grad():
        # Trained models never write the tokens of sound or pictures, but random weights would.
        model.thinker.lm_head.weight[FIRST:] = 0
        model.thinker.lm_head.weight[ID["<|im_end|>"]] = model.thinker.lm_head.weight[7] * 1.02
        for part in model.code2wav.modules():
            if hasattr(part, "gamma"):
                part.gamma.fill_(0.3)
        for name, weight in model.talker.named_parameters():
            # `transformers` does not initialize these.
            if ".experts." in name or name.endswith("mlp.gate.weight"):
                weight.normal_(0, 0.25)
        # The weights are so small that the audio is not clipped.
        model.code2wav.decoder[-1].conv.weight *= 0.001
    model.save_pretrained(where)
    WhisperFeatureExtractor(feature_size=16, n_fft=400, chunk_length=30).save_pretrained(where)
    extractor = json.loads((where / "preprocessor_config.json").read_text())
    (where / "preprocessor_config.json").write_text(json.dumps(extractor | {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "temporal_patch_size": 2, "merge_size": 2,
        "size": {"shortest_edge": 256, "longest_edge": 4096}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }))  # fmt: skip
    return where
