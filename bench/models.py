"""Models of released shapes with random weights, and tiny models, which show that the code runs.

`shapes.json` has the values of the released config.json files that differ from the defaults, and the tiny shapes that
the tests do not define. If no tokenizer of the model's family is given, one is created. With random weights, an end
token is as rare as any other token.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from accelerate import init_empty_weights
from tests.adapters import tiny_minicpmo, tiny_qwen3_asr, tiny_qwen3_omni, tiny_qwen3_tts, tiny_token2wav, tiny_vlm
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import nn
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3ASRConfig,
    Qwen3ASRForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    WhisperFeatureExtractor,
)

from antiphon.adapters.minicpmo.checkpoint import DEFAULT_VISION, OTHER_PARTS, MiniCpmOConfig
from antiphon.adapters.minicpmo.checkpoint import build as build_minicpmo
from antiphon.adapters.minicpmo.model import MiniCpmO
from antiphon.adapters.minicpmo.token2wav.calls import WindowCalls
from antiphon.adapters.minicpmo.token2wav.files import FlowConfig
from antiphon.adapters.minicpmo.token2wav.flow import Flow, FlowSlots
from antiphon.adapters.minicpmo.token2wav.hift import CausalHift, load_hift
from antiphon.adapters.minicpmo.token2wav.hift_layers import HiftConfig
from antiphon.adapters.minicpmo.token2wav.token2wav import Token2Wav, read_flow, read_hift
from antiphon.adapters.minicpmo.token2wav.vocoder import HiftSlots
from antiphon.adapters.minicpmo.token2wav.voice import PromptVoice
from antiphon.adapters.qwen3_asr.audio_encoder import WindowedAudioEncoder
from antiphon.adapters.qwen3_asr.checkpoint import END as ASR_END
from antiphon.adapters.qwen3_asr.checkpoint import Qwen3AsrParts
from antiphon.adapters.qwen3_asr.transcriber import Qwen3Asr
from antiphon.adapters.qwen3_omni.checkpoint import parts_of
from antiphon.adapters.qwen3_omni.model import Qwen3Omni
from antiphon.adapters.qwen3_tts.checkpoint import END as TTS_END
from antiphon.adapters.qwen3_tts.checkpoint import Qwen3TtsConfig, SpeechTokenizerConfig
from antiphon.adapters.qwen3_tts.checkpoint import build as build_tts
from antiphon.adapters.qwen3_tts.synthesizer import Qwen3Tts
from antiphon.adapters.spec import EngineModelOptions
from antiphon.adapters.vlm.session import VisionLanguageModel
from antiphon.engine.local.weights import weights_for
from antiphon.modeling.codec.talker import DEFAULT_CODEC_SAMPLING
from antiphon.modeling.omni.conversation import tokenizer
from antiphon.modeling.tensors import own_config
from antiphon.modeling.text_decoder import TextDecoder
from antiphon.modeling.tokens import Vocabulary

HERE = Path(__file__).resolve().parent
SHAPES: dict[str, dict[str, Any]] = json.loads((HERE / "shapes.json").read_text(encoding="utf-8"))
# Size of a vocabulary that covers the words of sentences.txt, so that a text has about as many tokens as with a
# released tokenizer.
TRAINED_VOCABULARY = 2000
# Checkpoints are written to this folder in memory if the bytes of the largest one are free there.
FOLDER_IN_MEMORY, FOLDER_BYTES = Path("/dev/shm"), 10 << 30
# Audio that resembles speech (float32 [16000 * seconds]), units of one second, and a native model's instructions.
sound, unit, NATIVE_PROMPT = tiny_qwen3_asr.sound, tiny_minicpmo.sound, tiny_minicpmo.PROMPT
OMNI_VOICE = "ethan"
# The length of MiniCPM-o's voices in codes: 5 s.
VOICE_CODES = 125
SMOL, QWEN, TINY_SMOL, TINY_QWEN = "SmolVLM2-2.2B", "Qwen2.5-VL-3B", "SmolVLM tiny", "Qwen2.5-VL tiny"
# The values of the released preprocessor_config.json.
PICTURES = {
    "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "size": {"shortest_edge": 3136, "longest_edge": 12845056},
}  # fmt: skip


# --- weights and tokenizers -------------------------------------------------------------------------------------------


def filled(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Fill a module in place with random weights of one dtype, on one device, and set eval mode.

    Matrices have a standard deviation of 0.02. Vectors are 0, or 1 in norms. A parameter that two modules share is
    filled only once.
    """
    for name, parameter in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        tensor = torch.empty(parameter.shape, device=device, dtype=dtype)
        if tensor.dim() > 1:
            tensor.normal_(std=0.02)
        else:
            tensor.fill_(1.0 if "norm" in name and leaf == "weight" else 0.0)
        module.get_submodule(owner)._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    module.to(device).eval()


def kind(options: EngineModelOptions, *, mixture: bool = False) -> tuple[torch.device, torch.dtype]:
    """Return a model's device and the dtype of its weights, and reset the random number generator."""
    torch.manual_seed(0)
    return torch.device(options.device), weights_for(options.device, options.weights, mixture=mixture)[1]


def made_tokenizer(
    special: Sequence[str], words: Sequence[str] = (), given: Tokenizer | None = None, *, trained: bool = True
) -> Tokenizer:
    """Return a byte-level tokenizer, or the `given` one, with control tokens and with `words` as one token each.

    If `trained`, its merges are learned from sentences.txt, which takes half a second. Otherwise it has no merges:
    every byte is a token, and the control tokens start at 256.
    """
    made = given
    if made is None:
        alphabet = sorted(ByteLevel.alphabet())
        made = Tokenizer(BPE(vocab={} if trained else {c: i for i, c in enumerate(alphabet)}, merges=[]))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=trained)
        made.decoder = decoders.ByteLevel()
        if trained:
            trainer = BpeTrainer(vocab_size=TRAINED_VOCABULARY, initial_alphabet=alphabet, show_progress=False)
            made.train_from_iterator((HERE / "sentences.txt").read_text(encoding="utf-8").splitlines(), trainer)
    made.add_special_tokens(list(special))
    made.add_tokens([AddedToken(word, normalized=False) for word in words])
    return made


def write_tokenizer(words: Tokenizer, folder: Path, end: str) -> None:
    """Write a tokenizer to a folder in the format of `transformers`. The control token `end` ends a turn."""
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=end).save_pretrained(folder)


def vocabulary(words: Tokenizer, end: str) -> Vocabulary:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(words, Path(folder), end)
        return Vocabulary(Path(folder), end)


# --- models -----------------------------------------------------------------------------------------------------------


def language_model(size: str, device: str, dtype: torch.dtype) -> Any:
    """Return a Qwen3ForCausalLM: "tiny" or "8B"."""
    torch.manual_seed(0)
    with init_empty_weights(include_buffers=False):
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPES[f"Qwen3-{size}"]))
    filled(model, torch.device(device), dtype)
    return model


def transcriber(size: str, options: EngineModelOptions, words: Tokenizer | None = None) -> Qwen3Asr:
    """Return Qwen3-ASR: "tiny", "0.6B" or "1.7B". `words` is a tokenizer of the Qwen family."""
    where, dtype = kind(options)
    if size == "tiny":
        given = tiny_qwen3_asr.CONFIG["thinker_config"]
        own = {k: v for k, v in given["text_config"].items() if k not in ("rope_theta", "rope_scaling")}
        shape = {"audio_config": dict(given["audio_config"]), "text_config": own}
    else:
        shape = SHAPES[f"Qwen3-ASR-{size}"]
    text, whole = shape["text_config"] | {"tie_word_embeddings": False}, Qwen3ASRForConditionalGeneration
    with init_empty_weights(include_buffers=False):
        model: Any = whole(Qwen3ASRConfig(audio_config=shape["audio_config"], text_config=text))
    filled(model, where, dtype)
    # The head shares the embedding table.
    model.lm_head.weight = model.model.language_model.embed_tokens.weight
    known = vocabulary(made_tokenizer(tiny_qwen3_asr.SPECIAL, given=words, trained=size != "tiny"), ASR_END)
    decoder = TextDecoder(model.model.language_model, model.lm_head)
    return Qwen3Asr(
        Qwen3AsrParts(known, WindowedAudioEncoder(model.model), decoder), f"qwen3-asr-{size.lower()}", options
    )


def synthesizer(size: str, options: EngineModelOptions, words: Tokenizer | None = None) -> Qwen3Tts:
    """Return Qwen3-TTS with its own voices: "tiny", "0.6B" or "1.7B". `words` is a tokenizer of the Qwen family.

    The vocoder has the default shape of the published package (qwen-tts 0.1.1).
    """
    where, dtype = kind(options)
    given, vocoder, samples = (
        tiny_qwen3_tts.config("custom_voice"),
        tiny_qwen3_tts.VOCODER,
        tiny_qwen3_tts.FRAME_SAMPLES,
    )
    if size != "tiny":
        given, vocoder, samples = given | SHAPES["Qwen3-TTS-0.6B"], SHAPES["Qwen3-TTS-vocoder"], 1920
    if size == "1.7B":
        given["talker_config"] = given["talker_config"] | {"hidden_size": 2048, "intermediate_size": 6144}
    # A tokenizer that was given has the words already.
    own = () if words else tiny_qwen3_tts.WORDS
    known = vocabulary(made_tokenizer(tiny_qwen3_tts.SPECIAL, own, words, trained=size != "tiny"), TTS_END)
    speech = {"decoder_config": vocoder, "decode_upsample_rate": samples, "output_sample_rate": 24000}
    configs = msgspec.convert(given, Qwen3TtsConfig), None, msgspec.convert(speech, SpeechTokenizerConfig)
    parts = build_tts(*configs, known, DEFAULT_CODEC_SAMPLING)
    for module in (parts.decoder, parts.text_embedding, parts.text_projection, parts.code_predictor):
        filled(module, where, dtype)
    filled(parts.vocoder, where, torch.float32)
    return Qwen3Tts(parts, f"qwen3-tts-{size.lower()}", options)


class Silent:
    """Stands in for token2wav: codes are generated, but no audio. It is the stream of all conversations."""

    lookahead, room = 3, 1_000_000

    async def open(self, reference: Any) -> Silent:
        return self

    async def decode(self, codes: Any, *, last: bool) -> Any:
        return np.zeros(960 * len(codes), np.float32)

    def end_turn(self) -> None:
        pass

    def close(self) -> None:
        pass


def token2wav(size: str, device: torch.device, num_slots: int) -> Token2Wav:
    """Return token2wav, "tiny" or "4.5", whose voices have no more than 5 s. All of them are the same voice."""
    if size == "tiny":
        with tempfile.TemporaryDirectory() as name:
            folder = tiny_token2wav.write(Path(name))
            flow, hift = read_flow(folder, device), read_hift(folder, device)
    else:
        flow = Flow(msgspec.convert(SHAPES["MiniCPM-o-4.5-flow"], FlowConfig))
        empty = CausalHift(HiftConfig())
        for module in (flow, empty):
            filled(module, device, torch.float32)
        hift = load_hift(empty.state_dict(), {}, device, causal=True)
    voice = PromptVoice(torch.arange(VOICE_CODES), torch.ones(192), torch.zeros(2 * VOICE_CODES, 80))
    windows = WindowCalls(FlowSlots(flow, num_slots, max_prompt=VOICE_CODES), HiftSlots(hift, num_slots))
    made = Token2Wav(windows, lambda _: voice, np.zeros(1, np.float32))
    if device.type == "cuda":
        windows.warm()
    return made


def native_model(size: str, options: EngineModelOptions, *, speakers: int = 0) -> MiniCpmO:
    """Return MiniCPM-o, "tiny" or "4.5", with sound for `speakers` sessions.

    With 0, it generates the codes of speech for any number of sessions, but no audio.
    """
    where, dtype = kind(options)
    config = dict(tiny_minicpmo.CONFIG)
    if size != "tiny":
        own = SHAPES["MiniCPM-o-4.5"]
        parts_of_it = {name: config[name] | own[name] for name in ("audio_config", "tts_config")}
        config |= own | parts_of_it | {"vision_config": DEFAULT_VISION}
    words = made_tokenizer(tiny_minicpmo.SPECIAL, trained=False)
    language = Qwen3Config(**own_config(config, *OTHER_PARTS))
    parts = build_minicpmo(msgspec.convert(config, MiniCpmOConfig), language, words)
    for module in (parts.decoder, parts.audio_encoder, parts.vision_encoder, parts.text_conditions, parts.code_decoder):
        filled(module, where, dtype)
    vocoder = token2wav(size, where, speakers) if speakers else Silent()
    return MiniCpmO(parts, f"minicpm-o-{size}", options, vocoder=vocoder)


def omni_config(ids: dict[str, int]) -> Any:
    """Return the configuration of Qwen3-Omni-30B-A3B. `ids` are the ids of the tokenizer's control tokens."""
    shape = SHAPES["Qwen3-Omni-30B-A3B"]
    places = {n: ids[f"<|{n[:5]}_pad|>"] for n in ("audio_token_id", "image_token_id", "video_token_id")}
    places |= {"vision_start_token_id": ids["<|vision_start|>"], "audio_start_token_id": ids["<|audio_start|>"]}
    named = {"im_start": "<|im_start|>", "im_end": "<|im_end|>", "tts_pad": "<tts_pad>", "tts_bos": "<tts_text_bos>"}
    named |= {"tts_eos": "<tts_text_eod>", "system": "system", "user": "user", "assistant": "assistant"}
    return Qwen3OmniMoeConfig(
        thinker_config=shape["thinker_config"] | {"user_token_id": ids["user"]} | places,
        talker_config=shape["talker_config"] | places,
        code2wav_config=shape["code2wav_config"],
        **{f"{name}_token_id": ids[text] for name, text in named.items()},
    )


def conversation_model(size: str, options: EngineModelOptions, words: Tokenizer | None = None) -> Qwen3Omni:
    """Return Qwen3-Omni: "tiny" or "30B-A3B". `words` is a tokenizer of the Qwen family.

    Its 35 billion parameters do not fit into the memory of a machine without a GPU. There, all layers of a decoder
    share the experts of one layer. A step still reads and multiplies the same amount.
    """
    tiny = tiny_qwen3_omni
    where, dtype = kind(options, mixture=True)
    words = made_tokenizer(tiny.SPECIAL, tiny.WORDS, words, trained=size != "tiny")
    ids = {text: words.token_to_id(text) for text in (*tiny.SPECIAL, *tiny.WORDS)}
    config = tiny.config() if size == "tiny" else omni_config(ids)
    with init_empty_weights(include_buffers=False):
        whole: Any = Qwen3OmniMoeForConditionalGeneration(config)
    if options.device == "cpu":
        for layers in (whole.thinker.get_decoder().layers, whole.talker.model.layers):
            shared = layers[0].mlp.experts
            filled(shared, where, dtype)
            for layer in layers[1:]:
                layer.mlp.experts = shared
    filled(whole, where, dtype)
    with torch.no_grad():
        # A trained model generates no control tokens between words, but one with random weights would.
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


@contextmanager
def vision_model(size: str, options: EngineModelOptions) -> Iterator[VisionLanguageModel]:
    """Yield SMOL, QWEN or a tiny vision model, and close it at the end.

    Each is first written to a folder, then loaded.
    """
    where = FOLDER_IN_MEMORY if shutil.disk_usage(FOLDER_IN_MEMORY).free > FOLDER_BYTES else None
    with tempfile.TemporaryDirectory(dir=where) as name:
        _write_vision(size, Path(name), options)
        model = VisionLanguageModel(Path(name), size.lower(), options)
    try:
        yield model
    finally:
        model.close()


def _write_vision(size: str, folder: Path, options: EngineModelOptions) -> None:
    where, dtype = kind(options)
    smol, shape = size.startswith("SmolVLM"), SHAPES[size]
    special = tiny_vlm.SMOL if smol else tiny_vlm.QWEN
    words = made_tokenizer(special)
    write_tokenizer(words, folder, special[1])
    ids = {name: words.token_to_id(name) for name in special}
    text = shape["text_config"] | {"eos_token_id": ids[special[1]], "pad_token_id": ids["<pad>"]}
    with init_empty_weights(include_buffers=False):
        if smol:
            marks = {"image_token_id": ids["<image>"], "pad_token_id": ids["<pad>"]}
            model: Any = SmolVLMForConditionalGeneration(SmolVLMConfig(**shape | marks | {"text_config": text}))
        else:
            marks = {f"{name}_token_id": ids[f"<|{name}|>"] for name in ("vision_start", "vision_end")}
            marks |= {f"{name}_token_id": ids[f"<|{name}_pad|>"] for name in ("image", "video")}
            qwen = Qwen2_5_VLConfig(**shape | marks | {"text_config": text})
            model = Qwen2_5_VLForConditionalGeneration(qwen)
            (folder / "preprocessor_config.json").write_text(json.dumps(PICTURES))
    filled(model, where, dtype)
    model.save_pretrained(folder)
