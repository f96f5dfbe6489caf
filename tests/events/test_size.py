"""The estimated memory of commands and items."""

from __future__ import annotations

import tracemalloc

import numpy as np

from antiphon.contracts import AudioPart, ImagePart
from antiphon.events.conversation import ContentPart, CreateItem, CreateResponse, Item
from antiphon.events.size import num_bytes
from antiphon.events.tools import Tool
from antiphon.vision.images import EncodedImage


def test_when_an_item_holds_text_and_media_then_all_of_it_counts() -> None:
    empty = num_bytes(Item("a", parts=[ContentPart("input_text")]))
    text = num_bytes(Item("a", parts=[ContentPart("input_text", "x" * 10_000)]))
    assert 10_000 <= text - empty < 10_100
    image = ContentPart("input_image", image="data:" + "x" * 1000, media=ImagePart(EncodedImage(b"y" * 750)))
    assert num_bytes(Item("a", parts=[image])) - empty > 1750
    audio = ContentPart("input_audio", media=AudioPart(np.zeros(16_000, np.float32)))
    assert 64_000 < num_bytes(Item("a", parts=[audio])) - empty < 64_500
    assert num_bytes(Item("a", output="z" * 5000)) > 5000


def test_when_a_command_brings_what_is_kept_beside_items_then_that_counts_too() -> None:
    schema = {"type": "object", "properties": {f"field {i}": {"type": "string"} for i in range(1000)}}
    tool = Tool("lookup", "d" * 3000, schema)
    assert num_bytes(CreateResponse(instructions="x" * 2000, tools=(tool,), metadata={"k": "v" * 500})) > 50_000
    assert num_bytes(CreateItem(Item("a", arguments="{}" * 400))) > 800


def test_when_an_item_is_of_many_small_objects_then_it_counts_about_as_much_as_it_takes() -> None:
    tracemalloc.start()
    item = Item("a", parts=[ContentPart("input_text", f"part {i}") for i in range(10_000)])
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.5 < num_bytes(item) / taken < 2
