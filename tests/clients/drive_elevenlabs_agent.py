"""elevenlabs' Conversation: turns in writing, and a spoken conversation with an interruption and a client's tool."""

import logging
import os
import sys
import threading
import time
from collections import deque

import soundfile
from elevenlabs.client import ElevenLabs
from elevenlabs.conversational_ai.conversation import (
    AudioInterface,
    ClientTools,
    Conversation,
    ConversationInitiationData,
)

TURNS = int(os.environ.get("TURNS", "100"))
PIECE_S = 0.25
PIECE = int(32_000 * PIECE_S)
WEATHER = {
    "type": "client",
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "expects_response": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
# What the SDK reports instead of raising: a message that it cannot read ends the conversation.
failures = []


class Failures(logging.Handler):
    def emit(self, record):
        if record.levelno >= logging.ERROR:
            failures.append(record.getMessage())


class Line(AudioInterface):
    """A microphone that is silent unless it has something to say, and a loudspeaker that counts."""

    def __init__(self):
        self.words = deque()
        self.num_bytes = self.cuts = 0
        self.over = threading.Event()

    def start(self, input_callback):
        def run():
            at = time.monotonic()
            while not self.over.is_set():
                input_callback(self.words.popleft() if self.words else bytes(PIECE))
                at += PIECE_S
                time.sleep(max(0.0, at - time.monotonic()))

        threading.Thread(target=run, daemon=True).start()

    def stop(self):
        self.over.set()

    def output(self, audio):
        self.num_bytes += len(audio)

    def interrupt(self):
        self.cuts += 1

    def say(self, pcm):
        data = pcm.tobytes()
        self.words.extend(data[at : at + PIECE].ljust(PIECE, b"\0") for at in range(0, len(data), PIECE))


class Talk:
    """A conversation, and what its callbacks were called with."""

    def __init__(self, client, *, signed, **override):
        self.line, self.answers, self.corrections, self.heard = Line(), [], [], []
        self.pings, self.cities = [], []
        tools = ClientTools()
        tools.register("get_weather", self.weather)
        self.conversation = Conversation(
            client,
            "agent_of_mine",
            requires_auth=signed,
            audio_interface=self.line,
            config=ConversationInitiationData(conversation_config_override=override, dynamic_variables={"name": "Ann"}),
            client_tools=tools,
            callback_agent_response=self.answers.append,
            callback_agent_response_correction=lambda original, heard: self.corrections.append((original, heard)),
            callback_user_transcript=self.heard.append,
            callback_latency_measurement=self.pings.append,
        )

    def weather(self, parameters):
        self.cities.append(parameters.get("city"))
        return "It rains, 17 degrees."

    def __enter__(self):
        self.conversation.start_session()
        # The SDK connects in a thread.
        self.until("the connection", lambda: self.conversation._ws)
        return self

    def __exit__(self, *_):
        self.conversation.end_session()
        assert self.conversation.wait_for_session_end().startswith("conv_")

    def until(self, what, condition, seconds=90):
        ends_s = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < ends_s, (what, self.answers[-3:])
            assert not failures, (what, failures)
            time.sleep(0.02)


def written(client):
    """TURNS messages, each answered in text."""
    agent = {"prompt": {"prompt": "You are terse. Answer with one word."}}
    # The version of 2025 has no type for `text_only` at this place, and sends it as it is.
    with Talk(client, signed=False, agent=agent, text_only=True) as talk:
        for turn in range(TURNS):
            talk.conversation.send_user_message(f"Say the number {turn}.")
            talk.until(f"answer {turn}", lambda turn=turn: len(talk.answers) > turn)
        talk.conversation.register_user_activity()
    assert all(talk.answers)
    assert not talk.line.num_bytes


def spoken(client, pcm):
    prompt = {"prompt": "You help {{name}}. Use your tools.", "tools": [WEATHER], "llm": "gpt-4o"}
    agent = {"prompt": prompt, "first_message": "Hello {{name}}.", "language": "en"}
    with Talk(client, signed=True, agent=agent, tts={"voice_id": "21m00Tcm4TlvDq8ikWAM"}) as talk:
        talk.until("the greeting", lambda: talk.answers and talk.line.num_bytes)
        time.sleep(2)
        for _ in range(5):
            before = len(talk.answers)
            talk.conversation.send_user_message("Use the function get_weather for Paris.")
            talk.until("an answer", lambda before=before: len(talk.answers) > before or talk.cities)
            if talk.cities:
                break
        talk.until("the answer with the weather", lambda: any("17" in text for text in talk.answers))
        before = len(talk.answers)
        talk.line.say(pcm)
        talk.until("the words", lambda: any("surpassed" in text for text in talk.heard))
        talk.until("the answer", lambda: len(talk.answers) > before)
        talk.conversation.send_contextual_update("The user likes ships.")
        before = talk.line.num_bytes
        talk.conversation.send_user_message("Tell me a long story about a ship and its crew.")
        talk.until("the story", lambda: talk.line.num_bytes > before + 32_000)
        time.sleep(1.0)
        cuts = talk.line.cuts
        talk.line.say(pcm)
        talk.until("the interruption", lambda: talk.line.cuts > cuts)
        talk.until("the correction", lambda: any(len(heard) < len(said) for said, heard in talk.corrections))
        talk.until("the answer", lambda: sum("surpassed" in text for text in talk.heard) > 1)
    assert talk.pings, "no latency was measured"
    return talk


def main():
    logging.getLogger("elevenlabs").addHandler(Failures())
    client = ElevenLabs(api_key="none", base_url=sys.argv[1])
    pcm, rate = soundfile.read(sys.argv[2], dtype="int16")
    assert rate == 16_000
    began_s = time.monotonic()
    written(client)
    turn_s = (time.monotonic() - began_s) / TURNS
    talk = spoken(client, pcm)
    assert not failures, failures
    said, heard = talk.corrections[-1]
    print(
        f"elevenlabs_agent: {TURNS} turns in text, {turn_s:.2f} s each; spoken: {talk.line.num_bytes / 32_000:.0f} s "
        f"of sound, {talk.line.cuts} interruptions, {len(heard)} of {len(said)} characters heard, tool called for "
        f"{talk.cities}, ping {min(talk.pings)} ms"
    )


main()
