import json

from openai import OpenAI


def get_weather(city: str) -> str:
    return f"It rains in {city}, 17 degrees."


TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Tell the weather in a city now.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
with client.realtime.connect(model="default") as connection:
    connection.session.update(session={"type": "realtime", "tools": [TOOL]})
    text = {"type": "input_text", "text": "What is the weather in Paris?"}
    connection.conversation.item.create(item={"type": "message", "role": "user", "content": [text]})
    connection.response.create()
    for event in connection:
        if event.type == "response.function_call_arguments.done":
            output = get_weather(**json.loads(event.arguments))
            item = {"type": "function_call_output", "call_id": event.call_id, "output": output}
            connection.conversation.item.create(item=item)
        elif event.type == "response.output_audio_transcript.done":
            print(event.transcript)
            break
        elif event.type == "response.done":
            connection.response.create()
