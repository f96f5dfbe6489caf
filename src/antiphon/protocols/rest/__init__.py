"""REST requests and answers: chat completions, transcriptions."""
