"""The transcriber on other servers."""
