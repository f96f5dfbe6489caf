"""Models on other servers: language models by OpenAI's API, engines, and what speaking to both shares."""
