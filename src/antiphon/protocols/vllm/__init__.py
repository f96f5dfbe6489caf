"""vLLM's realtime dialect, for transcripts and for a conversation model's responses: docs/wire/vllm-realtime.md."""
