"""Runs the published token2wav with tiny weights, and writes golden/token2wav_flow.npz.

    PYTHONPATH=src:SITE python -m tests.adapters.published_token2wav PACKAGE

PACKAGE is the folder `stepaudio2` of minicpmo-utils 1.0.7, and SITE a folder with the package einops. Neither is
needed for the tests.
"""

from __future__ import annotations

import ast
import os
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from tests.adapters import tiny_token2wav as tiny


def build(config: dict[str, Any], package: str) -> Any:
    """Return the published flow, without the part of the package that needs a GPU."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    sys.modules["stepaudio2"] = types.ModuleType("stepaudio2")
    sys.modules["stepaudio2"].__path__ = [package]

    def cls(name: str) -> Any:
        module, _, attribute = name.rpartition(".")
        return getattr(import_module(f"stepaudio2.{module}"), attribute)

    decoder = config.pop("decoder")
    dit = cls("cosyvoice2.flow.decoder_dit.DiT")(**decoder.pop("estimator"))
    flow = cls("cosyvoice2.flow.flow.CausalMaskedDiffWithXvec")(
        encoder=cls("cosyvoice2.transformer.upsample_encoder_v2.UpsampleConformerEncoderV2")(**config.pop("encoder")),
        decoder=cls("cosyvoice2.flow.flow_matching.CausalConditionalCFM")(dit, **decoder),
        **config,
    )
    # Its buffers have the released sizes.
    heads, width, hidden = dit.blocks[0].attn.num_heads, dit.blocks[0].attn.head_dim, dit.in_proj.out_features
    sizes = (len(dit.blocks), 2, heads, 1000, 2 * width)
    dit.att_cache_buffer, dit.cnn_cache_buffer = torch.zeros(sizes), torch.zeros(len(dit.blocks), 2, 2 * hidden, 2)
    flow.decoder.att_cache_buffer = torch.zeros(tiny.STEPS, *sizes)
    flow.decoder.cnn_cache_buffer = torch.zeros(tiny.STEPS, *dit.cnn_cache_buffer.shape)
    return flow


class _Plain(yaml.SafeLoader):
    pass


_Plain.add_multi_constructor("!", lambda loader, _, node: loader.construct_mapping(node, deep=True))


def main(package: str) -> None:
    config = yaml.load(tiny.flow_yaml(tiny.BANDS, tiny.GOLDEN_CODES), _Plain)["flow"]
    flow = build(config, package)
    tiny.fill(flow)
    out: dict[str, Any] = {"names": np.array(sorted(flow.state_dict()))}
    # The rule of what a stream forgets is in a method of the class that needs a GPU.
    names = {"_trim_estimator_cache", "_trim_conformer_cache"}
    source = (Path(package) / "token2wav.py").read_text()
    tree = ast.parse(source)
    owner = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Token2wav")
    owner.body = [n for n in owner.body if getattr(n, "name", "") in names or isinstance(n, ast.Assign)]
    made: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([owner], []), package, "exec"), made)
    for dtype in (torch.float32, torch.float64):
        flow.to(dtype).eval()
        flow.decoder.rand_noise = tiny.noise().T[None].to(dtype)
        for name in ("embed", "up_embed"):
            encoding = getattr(flow.encoder, name).pos_enc
            encoding.pe = encoding.pe.to(dtype)
        for stream, (length, _) in enumerate(tiny.STREAMS):
            codes, embedding, mel = tiny.voice(length)
            token2wav = made["Token2wav"]()
            token2wav.flow = flow
            token2wav.stream_cache = flow.setup_cache(
                torch.cat([codes, codes[:3]])[None],
                mel[None].to(dtype),
                embedding[None].to(dtype),
                n_timesteps=tiny.STEPS,
            )
            token2wav.stream_cache = {k: v.clone() for k, v in token2wav.stream_cache.items()}
            for at, (window, last) in enumerate(tiny.windows(stream)):
                frames, cache = flow.inference_chunk(
                    torch.tensor([window]),
                    embedding[None].to(dtype),
                    token2wav.stream_cache,
                    last_chunk=last,
                    n_timesteps=tiny.STEPS,
                )
                token2wav.stream_cache = {k: v.clone() for k, v in cache.items()}
                token2wav._trim_estimator_cache(2 * length)
                token2wav._trim_conformer_cache(2 * length)
                out[f"{dtype}.{stream}.{at}".removeprefix("torch.")] = frames[0].numpy()
    # The rounding errors of the published code itself.
    errors = [np.abs(out[k] - out[k.replace("64", "32")]).max() for k in list(out) if k.startswith("float64")]
    out = {k: v for k, v in out.items() if not k.startswith("float32")} | {"float32_error": np.array(max(errors))}
    np.savez_compressed(tiny.GOLDEN, **out)


if __name__ == "__main__":
    main(sys.argv[1])
