"""Models on other servers, spoken to over HTTP: a language model behind any server with OpenAI's API.

`address.py` reads how a server is named, `chat_completions.py` and `responses.py` spell requests and read what is
streamed, `client.py` sends them, with timeouts, one second attempt and a circuit breaker, and `language.py` is the
LanguageModel made of these.
"""
