"""A Qwen2.5-Omni with tiny random weights, in the layout of `transformers`, with the files of the released folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration, WhisperFeatureExtractor

from tests.adapters.tiny_qwen3_omni import FIRST, WORDS, write_tokenizer

SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|AUDIO|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
    "<|endoftext|>",
]
# The talker's codes, of which the last four are control codes, and the samples of a code (20 ms).
CODES, CODE_SAMPLES = 64, 24
ID = {text: FIRST + i for i, text in enumerate([*SPECIAL, *WORDS])}
# In the released folder, the template is next to the tokenizer.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif c.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif c.type == 'video' %}<|vision_bos|><|VIDEO|><|vision_eos|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def config(*, speaks: bool = False) -> Any:
    """Return a small configuration. The talker is disabled unless `speaks`."""
    thinker = {
        "text_config": {
            "vocab_size": FIRST + len(SPECIAL) + len(WORDS),
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "tie_word_embeddings": False,
            "initializer_range": 0.25,
        },
        "audio_config": {
            "num_mel_bins": 16,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "d_model": 32,
            "output_dim": 64,
            "n_window": 100,
            "initializer_range": 0.25,
        },
        "vision_config": {
            "depth": 3,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 48,
            "patch_size": 8,
            "window_size": 32,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.25,
        },
        "audio_token_index": ID["<|AUDIO|>"],
        "image_token_index": ID["<|IMAGE|>"],
        "video_token_index": ID["<|VIDEO|>"],
        "audio_start_token_id": ID["<|audio_bos|>"],
        "audio_end_token_id": ID["<|audio_eos|>"],
        "vision_start_token_id": ID["<|vision_bos|>"],
        "vision_end_token_id": ID["<|vision_eos|>"],
        "user_token_id": ID["user"],
        "initializer_range": 0.25,
    }
    return Qwen2_5OmniConfig(
        thinker_config=thinker,
        talker_config=talker_config(thinker) if speaks else None,
        token2wav_config=token2wav_config() if speaks else None,
        enable_audio_output=speaks,
    )


def talker_config(thinker: dict[str, Any]) -> dict[str, Any]:
    names = ("audio_token_index", "image_token_index", "video_token_index", "audio_start_token_id")
    names += ("audio_end_token_id", "vision_start_token_id", "vision_end_token_id")
    return {name: thinker[name] for name in names} | {
        "vocab_size": CODES,
        "tts_codec_pad_token_id": CODES - 4,
        "tts_codec_start_token_id": CODES - 3,
        "tts_codec_end_token_id": CODES - 2,
        "tts_codec_mask_token_id": CODES - 1,
        # Text tokens that do not occur in these conversations.
        "tts_text_start_token_id": 1,
        "tts_text_end_token_id": 2,
        "tts_text_pad_token_id": 3,
        "embedding_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "initializer_range": 0.25,
    }


def token2wav_config() -> dict[str, Any]:
    return {
        "dit_config": {
            "hidden_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "head_dim": 16,
            "emb_dim": 16,
            "block_size": 8,
            "look_ahead_layers": [2],
            "look_backward_layers": [0, 3],
            "num_embeds": CODES - 1,
            "mel_dim": 16,
            "enc_emb_dim": 8,
            "enc_dim": 8,
            "enc_channels": [8, 8, 8, 8, 24],
            "enc_attention_channels": 4,
            "enc_se_channels": 4,
        },
        "bigvgan_config": {
            "mel_dim": 16,
            "upsample_initial_channel": 16,
            "resblock_kernel_sizes": [3],
            "resblock_dilation_sizes": [[1, 3, 5]],
            "upsample_rates": [3, 4],
            "upsample_kernel_sizes": [7, 8],
        },
    }


def write(where: Path, *, speaks: bool = False) -> Path:
    """Write the checkpoint into an existing folder, and return the folder."""
    write_tokenizer(where, SPECIAL, TEMPLATE)
    torch.manual_seed(6)
    model: Any = Qwen2_5OmniForConditionalGeneration(config(speaks=speaks))
    with torch.no_grad():
        # Trained models never write the tokens of sound or pictures, but random weights would.
        model.thinker.lm_head.weight[FIRST:] = 0
        model.thinker.lm_head.weight[ID["<|im_end|>"]] = model.thinker.lm_head.weight[7] * 1.02
    if speaks:
        torch.manual_seed(7)
        for part in (model.token2wav.code2wav_dit_model, model.token2wav.code2wav_bigvgan_model):
            for weight in part.parameters():
                if weight.dim() > 1:
                    torch.nn.init.normal_(weight, std=0.5 * weight[0].numel() ** -0.5)
        voices = {
            name: {"bos_token": 4 + i, "cond": torch.randn(1, 8), "ref_mel": torch.randn(1, 30, 16)}
            for i, name in enumerate(("Chelsie", "Ethan"))
        }
        torch.save(voices, where / "spk_dict.pt")
    model.save_pretrained(where)
    WhisperFeatureExtractor(feature_size=16, n_fft=400, chunk_length=30).save_pretrained(where)
    extractor = json.loads((where / "preprocessor_config.json").read_text())
    (where / "preprocessor_config.json").write_text(json.dumps(extractor | {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "temporal_patch_size": 2, "merge_size": 2,
        "size": {"shortest_edge": 256, "longest_edge": 4096}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }))  # fmt: skip
    return where
