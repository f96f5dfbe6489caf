"""The configuration files of checkpoints: the fields that are read, and the errors for missing fields."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from antiphon.modeling.tensors import own_config, read_config
from antiphon.modeling.text_decoder import QwenTextConfig


class Sizes(msgspec.Struct):
    """A configuration with a required field and one with a default."""

    hidden_size: int
    eps: float = 1e-6


def test_fields_that_are_not_named_are_ignored_and_absent_ones_have_their_default(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Any"], "hidden_size": 8, "inner": {"hidden_size": 9}}')
    assert read_config(tmp_path / "config.json", Sizes) == Sizes(8, 1e-6)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"eps": 1}', "config.json: .*`hidden_size`"),
        ('{"hidden_size": "wide"}', r"config.json: .*\$.hidden_size"),
        ('{"hidden_size": 8, "eps": null}', r"config.json: .*\$.eps"),
        ("[8]", "config.json: Expected `object`"),
        ('{"hidden_size": ', "config.json: "),
        (b'{"hidden_size": 8, "eps": "\xff"}', "config.json: "),
    ],
)
def test_when_a_file_is_wrong_then_the_error_names_it_and_the_field(
    tmp_path: Path, text: str | bytes, says: str
) -> None:
    (tmp_path / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=says):
        read_config(tmp_path / "config.json", Sizes)


def test_when_there_is_no_file_then_the_error_is_the_systems(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_config(tmp_path / "config.json", Sizes)


def test_a_text_model_is_given_the_fields_that_its_configuration_has() -> None:
    rope = {"rope_type": "default", "rope_theta": 10_000}
    text = QwenTextConfig(hidden_size=8, attention_bias=False)
    assert text.keywords(10_000, tied=True) == {
        "hidden_size": 8,
        "attention_bias": False,
        "rope_parameters": rope,
        "tie_word_embeddings": True,
    }
    rotary = QwenTextConfig(rope_theta=5e6).keywords(10_000, tied=False)
    assert rotary == {"rope_parameters": rope | {"rope_theta": 5e6}, "tie_word_embeddings": False}


def test_a_part_is_not_given_the_names_of_classes_and_files_or_other_parts() -> None:
    config = {"model_type": "a", "_name_or_path": "b", "hidden_size": 8, "vision_config": {"hidden_size": 9}}
    assert own_config(config, "vision_config") == {"hidden_size": 8}
