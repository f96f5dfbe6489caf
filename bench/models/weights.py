"""Random weights in place, and a tokenizer without a download."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import nn
from transformers import PreTrainedTokenizerFast

SENTENCES = Path(__file__).resolve().parents[1] / "sentences.txt"
# Enough for the words of SENTENCES: a text becomes about as many tokens as with a released tokenizer.
TRAINED_VOCABULARY = 2000


def filled(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give a module random weights of a type on a device, in place, whatever device it is on, and eval mode.

    Matrices are drawn with a standard deviation of 0.02; vectors are 0, those of norms 1. A parameter that two modules
    have under two names is given to the first of them only.
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


def made_tokenizer(special: Sequence[str], words: Sequence[str] = (), *, trained: bool = True) -> Tokenizer:
    """Return a byte-level tokenizer with control tokens, and `words` that are one token each.

    `trained`: its merges are those of SENTENCES, in half a second; otherwise it has none, every byte is a token, and
    the control tokens begin at 256.
    """
    alphabet = sorted(ByteLevel.alphabet())
    made = Tokenizer(BPE(vocab={} if trained else {c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=trained)
    made.decoder = decoders.ByteLevel()
    if trained:
        trainer = BpeTrainer(vocab_size=TRAINED_VOCABULARY, initial_alphabet=alphabet, show_progress=False)
        made.train_from_iterator(SENTENCES.read_text(encoding="utf-8").splitlines(), trainer)
    made.add_special_tokens(list(special))
    made.add_tokens([AddedToken(word, normalized=False) for word in words])
    return made


def write_tokenizer(words: Tokenizer, folder: Path, end: str) -> None:
    """Write a tokenizer to a folder as `transformers` reads it. `end`: the control token that ends a turn."""
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=end).save_pretrained(folder)
