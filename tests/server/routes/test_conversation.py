"""Conversations with real models over real sockets: the order of events, barge-in, calls, truncation, errors."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import numpy as np
import openai
import pytest
import websockets

from antiphon.audio.line.g711 import from_ulaw
from antiphon.audio.pcm import from_pcm16
from tests.adapters.test_rapid_ocr import page
from tests.conftest import Process, Recording
from tests.server.clients import b64, connect, until_idle
from tests.server.conversations import TEXT_ONLY, ConversationClient, talk
from tests.vision.test_images import RED, encoded

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def create(item: Any) -> dict[str, Any]:
    return {"type": "conversation.item.create", "item": item}


def truncate(**fields: Any) -> dict[str, Any]:
    return {"type": "conversation.item.truncate", "item_id": "x", "content_index": 0} | fields


def update(**session: Any) -> dict[str, Any]:
    return {"type": "session.update", "session": {"type": "realtime"} | session}


WRONG_CONTENT = [{"type": "output_text", "text": "x"}]
WRONG_VAD = {"type": "semantic_vad", "eagerness": "x"}


def test_when_a_text_turn_is_answered_then_events_come_in_the_vendors_order(partner: Process) -> None:
    async def main() -> ConversationClient:
        async with talk(partner, **TEXT_ONLY, instructions="You are terse.") as wire:
            wire.seen.clear()
            await wire.text("Say hello.")
            await wire.say("response.create")
            await wire.until("rate_limits.updated")
            return wire

    wire = asyncio.run(main())
    assert wire.kinds() == [
        "conversation.item.added",
        "conversation.item.done",
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "conversation.item.done",
        "response.output_item.done",
        "response.done",
        "rate_limits.updated",
    ]
    done = next(f for f in wire.seen if f["type"] == "response.done")["response"]
    text = wire.joined("response.output_text.delta")
    assert text
    assert done["output"][0]["content"] == [{"type": "output_text", "text": text}]
    assert done["usage"]["output_tokens"] > 0
    assert done["usage"]["total_tokens"] == done["usage"]["input_tokens"] + done["usage"]["output_tokens"]
    added = [f for f in wire.seen if f["type"] == "conversation.item.added"]
    assert added[1]["previous_item_id"] == added[0]["item"]["id"]


def test_when_an_answer_was_spoken_then_the_next_turn_finds_its_kv(partner: Process) -> None:
    async def main() -> tuple[ConversationClient, list[dict[str, Any]]]:
        async with talk(partner, max_output_tokens=40) as wire:
            done = []
            for question in ("Tell me about the sea.", "And about the moon?"):
                await wire.text(question)
                await wire.say("response.create")
                done.append((await wire.until("response.done"))["response"])
            return wire, done

    wire, done = asyncio.run(main())
    for response in done:
        kinds = wire.kinds(response["id"])
        assert [k for k in kinds if "delta" not in k] == [
            "response.created",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_audio.done",
            "response.output_audio_transcript.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.done",
        ]
        transcript = wire.joined("response.output_audio_transcript.delta", response["id"])
        assert response["output"][0]["content"] == [{"type": "output_audio", "transcript": transcript}]
        pcm = from_pcm16(wire.spoken(response["id"]))
        assert len(pcm) / 24000 > 1.0
        assert np.abs(pcm).max() > 0.05
    assert done[1]["usage"]["input_token_details"]["cached_tokens"] > done[0]["usage"]["input_tokens"]


def test_when_a_question_is_spoken_then_it_is_transcribed_and_answered(
    partner: Process, recordings: dict[str, Recording]
) -> None:
    recording = recordings["lj-LJ001-0008"]

    async def main() -> ConversationClient:
        vad = {"type": "server_vad", "silence_duration_ms": 500}
        audio = {"input": {"transcription": {"model": "whisper-1"}, "turn_detection": vad}}
        async with talk(partner, audio=audio, max_output_tokens=30) as wire:
            wire.seen.clear()
            await wire.sound(recording.pcm, 2.0)
            await wire.until("response.done")
            return wire

    wire = asyncio.run(main())
    kinds = [k for k in wire.kinds() if "delta" not in k and k != "rate_limits.updated"]
    assert kinds[:5] == [
        "input_audio_buffer.speech_started",
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
    ]
    assert kinds[-1] == "response.done"
    named = {f["item_id"] for f in wire.seen if f["type"].startswith(("input_audio_buffer", "conversation.item.input"))}
    assert len(named) == 1
    heard = next(f for f in wire.seen if f["type"] == "conversation.item.input_audio_transcription.completed")
    assert "surpassed" in heard["transcript"]
    assert wire.spoken()


def test_when_the_user_barges_in_then_the_response_is_cancelled_and_the_turn_answered(
    partner: Process, recordings: dict[str, Recording]
) -> None:
    recording = recordings["lj-LJ001-0008"]

    async def main() -> tuple[ConversationClient, dict[str, Any], dict[str, Any]]:
        vad = {"type": "server_vad", "silence_duration_ms": 500}
        async with talk(partner, audio={"input": {"turn_detection": vad}}, max_output_tokens=20) as wire:
            await wire.text("Tell me a very long story about a king, a queen and their seven sons.")
            await wire.say("response.create", response={"max_output_tokens": 1000})
            await wire.until("response.output_audio.delta")
            await wire.sound(recording.pcm, 2.0)
            await wire.until("input_audio_buffer.speech_started")
            cut = (await wire.until("response.done"))["response"]
            nxt = (await wire.until("response.created"))["response"]
            await wire.until("response.done")
            return wire, cut, nxt

    wire, cut, nxt = asyncio.run(main())
    assert cut["status"] == "cancelled"
    assert cut["status_details"] == {"type": "cancelled", "reason": "turn_detected"}
    assert cut["output"][0]["status"] == "incomplete"
    end = next(k for k, f in enumerate(wire.seen) if f["type"] == "response.done" and f["response"]["id"] == cut["id"])
    assert not [f for f in wire.seen[end + 1 :] if f.get("response_id") == cut["id"]]
    assert nxt["id"] != cut["id"]


def test_when_a_response_is_cancelled_then_its_parts_and_item_are_closed_in_order(partner: Process) -> None:
    async def main() -> tuple[ConversationClient, dict[str, Any]]:
        async with talk(partner) as wire:
            await wire.text("Tell me a very long story.")
            wire.seen.clear()
            await wire.say("response.create", response={"max_output_tokens": 1000, "metadata": {"a": "b"}})
            await wire.until("response.output_audio.delta")
            await wire.say("response.cancel")
            done = (await wire.until("response.done"))["response"]
            await wire.say("response.cancel", event_id="late")
            error = (await wire.until("error"))["error"]
            assert (error["code"], error["event_id"]) == ("response_cancel_not_active", "late")
            await wire.text("Hi.")
            await wire.say("response.create", response={"max_output_tokens": 10})
            assert (await wire.until("response.done"))["response"]["status"] in ("completed", "incomplete")
            return wire, done

    wire, done = asyncio.run(main())
    assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "client_cancelled")
    assert done["metadata"] == {"a": "b"}
    kinds = [k for k in wire.kinds(done["id"]) if "delta" not in k]
    assert kinds[-6:] == [
        "response.content_part.added",
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.done",
    ]


def test_when_an_item_is_truncated_then_the_model_knows_only_what_was_heard(partner: Process) -> None:
    async def main() -> None:
        async with talk(partner, max_output_tokens=60) as wire:
            await wire.text("Tell me about the sea.")
            await wire.say("response.create")
            done = (await wire.until("response.done"))["response"]
            item = done["output"][0]
            whole = item["content"][0]["transcript"]
            length_ms = len(wire.spoken()) / 2 / 24
            await wire.say("conversation.item.truncate", item_id=item["id"], content_index=0, audio_end_ms=1500)
            assert (await wire.until("conversation.item.truncated"))["audio_end_ms"] == 1500
            await wire.say("conversation.item.retrieve", item_id=item["id"])
            kept = (await wire.until("conversation.item.retrieved"))["item"]["content"][0]["transcript"]
            assert whole.startswith(kept)
            assert 0 < len(kept) < len(whole)
            # A truncation beyond the item's end is clamped to it, and a second truncation does not restore anything.
            await wire.say(
                "conversation.item.truncate", item_id=item["id"], content_index=0, audio_end_ms=int(length_ms) + 9000
            )
            assert (await wire.until("conversation.item.truncated"))["audio_end_ms"] == 1500
            # The model continues from the part that was heard. Its prompt has only that part of the answer.
            before = done["usage"]["input_tokens"] + done["usage"]["output_tokens"]
            await wire.say("response.create", response={"max_output_tokens": 5, "output_modalities": ["text"]})
            after = (await wire.until("response.done"))["response"]["usage"]["input_tokens"]
            assert after < before

    asyncio.run(main())


def test_when_a_function_is_called_then_its_result_is_answered(partner: Process) -> None:
    async def main() -> ConversationClient:
        async with talk(partner, **TEXT_ONLY, tools=[WEATHER], tool_choice="required") as wire:
            await wire.text("What is the weather in Paris?")
            wire.seen.clear()
            await wire.say("response.create", response={"max_output_tokens": 100})
            done = (await wire.until("response.done"))["response"]
            (call,) = done["output"]
            assert (call["type"], call["name"], call["status"]) == ("function_call", "get_weather", "completed")
            assert list(json.loads(call["arguments"])) == ["city"]
            assert wire.joined("response.function_call_arguments.delta") == call["arguments"]
            item = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"sky": "clear"}'}
            await wire.say("conversation.item.create", item=item)
            await wire.say("response.create", response={"tool_choice": "none"})
            answer = (await wire.until("response.done"))["response"]
            assert answer["output"][0]["type"] == "message"
            return wire

    kinds = asyncio.run(main()).kinds()
    at = kinds.index("response.function_call_arguments.done")
    assert kinds[at + 1 : at + 4] == ["conversation.item.done", "response.output_item.done", "response.done"]


def test_when_a_response_is_out_of_band_then_it_leaves_no_item(partner: Process) -> None:
    async def main() -> None:
        async with talk(partner, **TEXT_ONLY) as wire:
            await wire.text("My name is Ada.")
            content = [{"type": "input_text", "text": "Say yes."}]
            own = {"type": "message", "role": "user", "content": content}
            wire.seen.clear()
            await wire.say(
                "response.create", response={"conversation": "none", "input": [own], "metadata": {"topic": "yes"}}
            )
            done = (await wire.until("response.done"))["response"]
            assert done["metadata"] == {"topic": "yes"}
            assert "conversation.item.done" not in wire.kinds(done["id"])
            await wire.say("conversation.item.retrieve", item_id=done["output"][0]["id"])
            assert (await wire.until("error"))["error"]["code"] == "item_retrieve_invalid_item_id"

    asyncio.run(main())


def test_when_a_turn_is_committed_then_its_response_waits_for_the_transcript(
    partner: Process, recordings: dict[str, Recording]
) -> None:
    recording = recordings["lj-LJ001-0008"]

    async def main() -> ConversationClient:
        audio = {"input": {"turn_detection": None, "transcription": {"model": "whisper-1"}}}
        async with talk(partner, audio=audio, **TEXT_ONLY) as wire:
            wire.seen.clear()
            await wire.sound(recording.pcm)
            await wire.say("input_audio_buffer.commit")
            await wire.say("response.create")
            await wire.until("response.done")
            await wire.say("input_audio_buffer.commit")
            assert (await wire.until("error"))["error"]["code"] == "input_audio_buffer_commit_empty"
            return wire

    kinds = asyncio.run(main()).kinds()
    assert kinds.index("conversation.item.input_audio_transcription.completed") < kinds.index("response.created")


@pytest.mark.parametrize(
    ("event", "code"),
    [
        ({"type": "boo"}, "invalid_value"),
        ({"type": "conversation.item.create"}, "missing_required_parameter"),
        (create({"type": "song"}), "invalid_value"),
        (create({"type": "message", "role": "user", "content": WRONG_CONTENT}), "unsupported_content_type"),
        ({"type": "conversation.item.retrieve", "item_id": "x"}, "item_retrieve_invalid_item_id"),
        ({"type": "conversation.item.delete", "item_id": "x"}, "item_delete_invalid_item_id"),
        (truncate(audio_end_ms=0), "item_truncate_invalid_item_id"),
        (truncate(), "missing_required_parameter"),
        ({"type": "response.cancel"}, "response_cancel_not_active"),
        ({"type": "response.create", "response": {"what": 1}}, "unknown_parameter"),
        ({"type": "response.create", "response": {"conversation": "maybe"}}, "invalid_value"),
        (update(what=1), "unknown_parameter"),
        (update(output_modalities=["smell"]), "invalid_value"),
        (update(max_output_tokens=0), "invalid_value"),
        (update(tools=[{"type": "hammer"}]), "invalid_value"),
        (update(audio={"output": {"speed": 9}}), "invalid_value"),
        (update(audio={"input": {"turn_detection": WRONG_VAD}}), "invalid_value"),
    ],
)
def test_when_an_event_is_wrong_then_the_error_has_its_code_and_the_session_lives(
    partner: Process, event: dict[str, Any], code: str
) -> None:
    async def main() -> None:
        async with talk(partner, **TEXT_ONLY) as wire:
            await wire.say(**event, event_id="mine")
            error = (await wire.until("error"))["error"]
            assert (error["code"], error["event_id"]) == (code, "mine")
            await wire.text("Hi")
            await wire.until("conversation.item.done")

    asyncio.run(main())


def test_when_a_response_is_active_then_another_one_and_another_voice_are_refused(partner: Process) -> None:
    async def main() -> None:
        async with talk(partner) as wire:
            await wire.text("Tell me a long story.")
            await wire.say("response.create", response={"max_output_tokens": 300})
            await wire.until("response.output_audio.delta")
            await wire.say("response.create")
            assert (await wire.until("error"))["error"]["code"] == "conversation_already_has_active_response"
            await wire.say(
                "session.update",
                session={"type": "realtime", "audio": {"output": {"voice": "marin"}}, "instructions": "x"},
            )
            assert (await wire.until("error"))["error"]["code"] == "cannot_update_voice"
            await wire.say("response.cancel")
            await wire.until("response.done")
            await wire.say("session.update", session={"type": "realtime"})
            # The update was refused as a whole.
            assert (await wire.until("session.updated"))["session"]["instructions"] == ""

    asyncio.run(main())


def test_when_the_client_is_of_the_beta_then_events_have_the_betas_names(partner: Process) -> None:
    async def main() -> ConversationClient:
        async with talk(
            partner,
            "?model=gpt-4o-realtime-preview",
            True,
            output_audio_format="g711_ulaw",
            max_response_output_tokens=20,
        ) as wire:
            await wire.text("Hello.")
            await wire.say("response.create")
            await wire.until("response.done")
            return wire

    wire = asyncio.run(main())
    kinds = wire.kinds()
    for kind in (
        "conversation.item.created",
        "response.audio_transcript.delta",
        "response.audio.delta",
        "response.audio.done",
    ):
        assert kind in kinds
    assert not [k for k in kinds if "output_audio" in k or k == "conversation.item.added"]
    data = b"".join(base64.b64decode(f["delta"]) for f in wire.seen if f["type"] == "response.audio.delta")
    assert np.abs(from_ulaw(data)).max() > 0.05


def test_when_the_stock_client_asks_then_it_gets_text(partner: Process) -> None:
    async def main() -> str:
        async with (
            openai.AsyncOpenAI(base_url=f"{partner.url}/v1", api_key="none") as client,
            client.realtime.connect(model="gpt-realtime") as live,
        ):
            await live.session.update(session={"type": "realtime", "output_modalities": ["text"]})
            await live.conversation.item.create(
                item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Say hello."}]}
            )
            await live.response.create(response={"max_output_tokens": 20})
            text = ""
            async for event in live:
                if event.type == "response.output_text.delta":
                    text += event.delta
                elif event.type == "response.done":
                    return text
        return ""

    assert asyncio.run(main())


def test_when_a_transcription_session_is_asked_for_then_there_is_no_conversation(
    partner: Process, recordings: dict[str, Recording]
) -> None:
    async def main() -> None:
        async with websockets.connect(f"{partner.ws}/v1/realtime?model=gpt-realtime", max_size=None) as socket:
            wire = ConversationClient(socket, beta=True)
            await wire.until("session.created")
            await wire.say("session.update", session={"type": "transcription"})
            updated = await wire.until("session.updated")
            assert updated["session"]["type"] == "transcription"
            await wire.sound(recordings["lj-LJ001-0008"].pcm, 2.0)
            done = await wire.until("conversation.item.input_audio_transcription.completed")
            assert "surpassed" in done["transcript"]

    asyncio.run(main())


def test_when_clients_leave_during_responses_then_nothing_is_left(
    partner: Process, recordings: dict[str, Recording]
) -> None:
    async def leave(k: int) -> None:
        async with talk(partner) as wire:
            if k % 3:
                await wire.text("Tell me a long story.")
                await wire.say("response.create", response={"max_output_tokens": 500})
                await wire.until("response.output_audio.delta" if k % 3 == 2 else "response.created")
            wire.socket.transport.abort()

    async def main() -> None:
        await asyncio.gather(*(leave(k) for k in range(9)), return_exceptions=True)
        await until_idle(partner)

    asyncio.run(main())


def picture(data: bytes) -> dict[str, Any]:
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    content = [{"type": "input_text", "text": "What does the sign say?"}, {"type": "input_image", "image_url": uri}]
    return {"type": "message", "role": "user", "content": content}


def test_when_an_item_has_audio_then_it_is_transcribed(talker: Process, recordings: dict[str, Recording]) -> None:
    async def main() -> tuple[str, int]:
        async with talk(talker, **TEXT_ONLY) as wire:
            content = [{"type": "input_audio", "audio": b64(recordings["jfk"].pcm, 24_000)}]
            item = {"type": "message", "id": "mine", "role": "user", "content": content}
            await wire.say("conversation.item.create", item=item)
            await wire.say("response.create", response={"max_output_tokens": 3})
            done = await wire.until("response.done")
            await wire.say("conversation.item.retrieve", item_id="mine")
            shown = await wire.until("conversation.item.retrieved")
            return shown["item"]["content"][0]["transcript"], done["response"]["usage"]["input_tokens"]

    said, tokens = asyncio.run(main())
    assert "ask not what your country can do for you" in said.lower().replace(",", "")
    assert tokens > 20


def test_when_an_item_has_an_image_then_the_text_on_it_reaches_the_model(talker: Process) -> None:
    async def main() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        done, errors = [], []
        async with talk(talker, **TEXT_ONLY) as wire:
            for image in (encoded(RED), page("Platform nine", "leaves at half past ten"), b"no image"):
                await wire.say("conversation.item.create", item=picture(image), event_id="mine")
                # The prompt has only this item, so its tokens can be counted.
                await wire.say("response.create", response={"conversation": "none"})
                done.append((await wire.until("response.done"))["response"])
                item = next(f for f in reversed(wire.seen) if f["type"] == "conversation.item.added")["item"]
                await wire.say("conversation.item.delete", item_id=item["id"])
            errors = [f["error"] for f in wire.seen if f["type"] == "error"]
        return done, errors

    (plain, written, broken), errors = asyncio.run(main())
    assert {r["status"] for r in (plain, written, broken)} <= {"completed", "incomplete"}
    assert written["usage"]["input_tokens"] > plain["usage"]["input_tokens"]
    assert [(e["code"], e["event_id"]) for e in errors] == [("invalid_image", "mine")]


@pytest.mark.parametrize(("rate_hz", "chunk_s"), [(24000, 0.1), (16000, 0.02)])
def test_when_a_client_only_sends_sound_then_it_is_heard_and_answered(
    partner: Process, recordings: dict[str, Recording], rate_hz: int, chunk_s: float
) -> None:
    # Like Hugging Face's speech-to-speech clients: no model in the URL, and no session.update.
    question = np.concatenate((recordings["lj-LJ001-0002"].pcm, np.zeros(32000, np.float32)))

    async def main() -> dict[str, Any]:
        async with connect(partner.ws) as wire:
            await wire.sound(question, rate=rate_hz, chunk_s=chunk_s)
            await wire.until("input_audio_buffer.speech_started")
            await wire.until("response.output_audio.delta")
            # The answer has no maximum length.
            await wire.say("response.cancel")
            return await wire.until("response.done")

    assert asyncio.run(main())["response"]["status"] in ("completed", "cancelled")
