"""OpenAI's Live API, with which a client speaks and listens at the same time. See docs/wire/openai-live.md."""
