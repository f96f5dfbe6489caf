"""Models on other servers: language models behind OpenAI's API, remote engines, and the HTTP code that both share."""
