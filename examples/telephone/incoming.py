"""Decides about the incoming calls of a server, with OpenAI's client: accepts a call, and prints what is said.

    pip install 'openai[realtime]'
    antiphon serve --telephone-webhook http://127.0.0.1:8100/calls   # with ANTIPHON_TELEPHONE_WEBHOOK_SECRET
    OPENAI_WEBHOOK_SECRET=whsec_... python examples/telephone/incoming.py --key KEY

Numbers in --block are rejected as busy.
"""

from __future__ import annotations

import argparse
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from openai import InvalidWebhookSignatureError, OpenAI

INSTRUCTIONS = "You are the telephone of a surgery. Answer in one or two short sentences. Ask for the caller's name."


def follow(client: OpenAI, call_id: str) -> None:
    """Print what is said in a call until it ends."""
    with client.realtime.connect(call_id=call_id) as connection:
        audio = {"input": {"transcription": {"model": "whisper-1"}}}
        connection.session.update(session={"type": "realtime", "audio": audio})
        for event in connection:
            if event.type == "session.updated":
                print(f"{call_id}: begun", flush=True)
            elif event.type == "conversation.item.input_audio_transcription.completed":
                print(f"{call_id}: caller: {event.transcript}", flush=True)
            elif event.type == "response.output_audio_transcript.done":
                print(f"{call_id}: model: {event.transcript}", flush=True)
    print(f"{call_id}: over", flush=True)


def decide(client: OpenAI, call_id: str, headers: dict[str, str], block: list[str]) -> None:
    """Accept a call and follow it, or reject it."""
    print(f"{call_id}: a call of {headers.get('From', 'an unknown number')}", flush=True)
    if headers.get("From", "") in block:
        client.realtime.calls.reject(call_id, status_code=486)
        return
    client.realtime.calls.accept(call_id, type="realtime", instructions=INSTRUCTIONS)
    follow(client, call_id)


def main() -> None:
    """Read the arguments, and wait for calls."""
    parser = argparse.ArgumentParser(description="Decide about the incoming calls of a server.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the server")
    parser.add_argument("--key", default="none", help="the API key that the calls belong to")
    parser.add_argument("--port", type=int, default=8100, help="where the server announces calls")
    parser.add_argument("--block", default="", help="numbers that are rejected, comma separated")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=args.key)

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            try:
                event = client.webhooks.unwrap(body, self.headers)
            except (InvalidWebhookSignatureError, ValueError):
                self.send_error(400)
                return
            self.send_response(200)
            self.end_headers()
            headers = {header.name: header.value for header in event.data.sip_headers}
            work = (client, event.data.call_id, headers, args.block.split(","))
            threading.Thread(target=decide, args=work, daemon=True).start()

    with ThreadingHTTPServer(("127.0.0.1", args.port), Webhook) as server:
        print(f"waits for calls on port {server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
