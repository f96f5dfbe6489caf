"""Models on other servers, called over HTTP: a language model behind any server with OpenAI's API.

`address.py` parses the name of a server, `chat_completions.py` and `responses.py` write requests and read streamed
events, `client.py` sends requests with timeouts, a second attempt and a circuit breaker, and `language.py` combines
them into a LanguageModel.
"""
