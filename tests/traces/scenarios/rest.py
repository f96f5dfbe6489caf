"""OpenAI's REST endpoints beside speech: completions, files, models, short-lived keys."""

from __future__ import annotations

from typing import Any

from tests.traces.harness import Response, Stage, pcm16, scenario, wav

CHAT = "/v1/chat/completions"
FILES = "/v1/audio/transcriptions"
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


@scenario()
async def completions(stage: Stage) -> None:
    whole = (await stage.request("POST", CHAT, {"model": "gpt-4o", "messages": user("hello")})).json
    assert whole["choices"][0]["message"]["content"] == "You said: hello."
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    streamed = {"model": "writer", "messages": user("tell me a story"), "stream": True, "max_tokens": 12}
    events = (await stage.request("POST", CHAT, streamed | {"stream_options": {"include_usage": True}})).events
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"]["completion_tokens"] == 12
    tools: dict[str, Any] = {"model": "default", "messages": user("the weather"), "tools": [WEATHER]}
    called = (await stage.request("POST", CHAT, tools)).json["choices"][0]
    assert called["finish_reason"] == "tool_calls"
    await stage.request("POST", CHAT, tools | {"stream": True})
    answer = [{"role": "assistant", "tool_calls": called["message"]["tool_calls"]}]
    answer += [{"role": "tool", "tool_call_id": "call_a", "content": "clear"}]  # type: ignore[list-item]
    reported = await stage.request(
        "POST", CHAT, tools | {"messages": tools["messages"] + answer, "tool_choice": "none"}
    )
    assert reported.json["choices"][0]["message"]["content"] == "It says clear."
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    await stage.request("POST", CHAT, {"model": "default", "messages": user("json"), "response_format": form})


@scenario()
async def completions_errors(stage: Stage) -> None:
    hello: dict[str, Any] = {"model": "default", "messages": user("hello")}
    for wrong in (
        {"messages": []},
        {"messages": "x"},
        {"messages": [{"role": "ghost", "content": "x"}]},
        {"messages": user("fail")},
        {"messages": user("fail"), "stream": True},
        {"n": 2},
        {"logprobs": True},
        {"temperature": "hot"},
        {"max_tokens": 0},
        {"what": 1},
        {"tools": [{"type": "hammer"}]},
        {"tool_choice": "required"},
        {"response_format": {"type": "xml"}},
    ):
        await stage.request("POST", CHAT, hello | wrong)
    assert (await stage.request("POST", CHAT, body=b"{")).status == 400
    assert (await stage.request("GET", CHAT)).status == 405
    assert (await stage.request("GET", "/v1/nothing")).status == 404


async def transcribed(stage: Stage, data: bytes, url: str = FILES, **fields: str) -> Response:
    """A file, as a form."""
    parts = [f'--line\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'.encode() for k, v in fields.items()]
    head = b'--line\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    body = b"".join(parts) + (head + data + b"\r\n" if data else b"") + b"--line--\r\n"
    return await stage.request("POST", url, body=body, headers={"content-type": "multipart/form-data; boundary=line"})


@scenario()
async def files(stage: Stage) -> None:
    said = wav("what is the time? tell me a story.", 0.3)
    assert (await transcribed(stage, said, model="whisper-1")).json["text"] == "what is the time? tell me a story."
    times = {"timestamp_granularities[]": "word"}
    verbose = (await transcribed(stage, said, model="ears", response_format="verbose_json", **times)).json
    assert [w["word"] for w in verbose["words"]][:2] == ["what", "is"]
    for form in ("verbose_json", "srt", "vtt", "text", "json"):
        await transcribed(stage, said, model="default", response_format=form, language="en", prompt="time")
    events = (await transcribed(stage, said, model="whisper-1", stream="true")).events
    assert events[-1]["text"] == "what is the time? tell me a story."
    await transcribed(stage, said, "/v1/audio/translations", model="whisper-1")


@scenario()
async def files_errors(stage: Stage) -> None:
    said = wav("hello.")
    for fields in (
        {"model": "nobody"},
        {"model": "whisper-1", "response_format": "pdf"},
        {"model": "whisper-1", "language": "tlh"},
        {"model": "whisper-1", "temperature": "hot"},
        {},
    ):
        assert (await transcribed(stage, said, **fields)).status >= 400
    assert (await transcribed(stage, b"", model="whisper-1")).status == 400
    assert (await transcribed(stage, pcm16("hello."), model="whisper-1")).status == 400
    assert (await transcribed(stage, wav("fail"), model="whisper-1")).status == 500
    await transcribed(stage, wav("fail"), model="whisper-1", stream="true")


@scenario()
async def facts(stage: Stage) -> None:
    """What the server says of itself."""
    listed = (await stage.request("GET", "/v1/models")).json["data"]
    assert {m["id"] for m in listed} == {"ears", "writer", "voice", "default"}
    await stage.request("GET", "/v1/models/writer")
    # Names that requests accept, and a base URL that ends in a slash.
    assert (await stage.request("GET", "/v1/models/whisper-1")).json["root"] == "ears"
    assert (await stage.request("GET", "/v1//models/tts-1-hd")).json["root"] == "voice"
    assert (await stage.request("GET", "/v1//audio/models")).json["models"] == [{"id": "voice", "name": "voice"}]
    assert (await stage.request("GET", "/v1/models/nobody")).status == 404
    await stage.request("GET", "/ready")
    await stage.request("GET", "/health")


@scenario(server={"api_keys": ("key",)})
async def client_secrets(stage: Stage) -> None:
    """Keys are asked for; a short-lived one opens the session it was made for, until it expires."""
    key = {"authorization": "Bearer key"}
    assert (await stage.request("POST", "/v1/realtime/client_secrets", {})).status == 401
    refused = await stage.connect("/v1/realtime")
    assert refused.status == 401
    session = {"type": "realtime", "model": "gpt-realtime", "instructions": "Be brief.", "output_modalities": ["text"]}
    asked = {"expires_after": {"anchor": "created_at", "seconds": 10}, "session": session}
    made = (await stage.request("POST", "/v1/realtime/client_secrets", asked, headers=key)).json
    protocols = ["realtime", f"openai-insecure-api-key.{made['value']}"]
    socket = await stage.connect("/v1/realtime", subprotocols=protocols)
    created = await socket.until("session.created")
    assert created["session"]["instructions"] == "Be brief."
    only_text = {"session": {"type": "transcription", "audio": {"input": {"turn_detection": None}}}}
    heard = (await stage.request("POST", "/v1/realtime/client_secrets", only_text, headers=key)).json
    other = await stage.connect("/v1/realtime", headers={"authorization": f"Bearer {heard['value']}"})
    await other.until("session.created")
    beta = {"model": "gpt-4o-realtime-preview", "modalities": ["text"], "voice": "two"}
    old = (await stage.request("POST", "/v1/realtime/sessions", beta, headers=key)).json
    await stage.request("POST", "/v1/realtime/client_secrets", {"expires_after": {"seconds": 1}}, headers=key)
    await stage.request("POST", "/v1/realtime/client_secrets", {"session": {"what": 1}}, headers=key)
    await stage.request("POST", "/v1/realtime/client_secrets", body=b"{", headers=key)
    duplex = await stage.connect("/v1/duplex", headers={"authorization": f"Bearer {old['client_secret']['value']}"})
    await duplex.say("session.heartbeat")
    await stage.wait(1)
    await stage.wait(10)
    late = await stage.connect("/v1/realtime", subprotocols=protocols)
    assert late.status == 401


@scenario(server={"api_keys": ("key",)})
async def nothing_there(stage: Stage) -> None:
    """An unknown path is answered with those that resemble it. A missing key and a wrong key have different errors."""
    key = {"authorization": "Bearer key"}
    for url in ("/v1/realtme", "/v1/models"):
        wrong = await stage.connect(url, headers=key)
        assert wrong.status == 404
    for path in ("/v1/audio/speeches", "/nothing", "/internal/stats"):
        missing = await stage.request("GET", path, headers=key)
        assert missing.status == 404
        message = missing.json["error"]["message"]
        assert ("POST /v1/audio/speech," in message) == (path == "/v1/audio/speeches")
        assert "docs/wire/index.md" in message
        assert " /internal" not in message.removeprefix(f"There is no {path}")
    plain = await stage.request("GET", "/v1/realtime", headers=key)
    assert plain.json["error"]["message"].startswith("/v1/realtime is a WebSocket. Nearest: WS /v1/realtime.")
    none, other = (
        await stage.request("GET", "/v1/models"),
        await stage.request("GET", "/v1/models", headers={"authorization": "Bearer other"}),
    )
    assert (none.status, other.status) == (401, 401)
    assert "didn't provide an API key" in none.json["error"]["message"]
    assert "Incorrect API key" in other.json["error"]["message"]
    assert (await stage.request("PUT", "/v1/models", headers=key)).status == 405
