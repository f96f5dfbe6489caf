"""vLLM's realtime dialect (docs/wire/vllm-realtime.md): transcripts, and the responses of a conversation model."""
