"""Bodies of HTTP requests and answers: chat completions, and transcriptions of files. docs/wire describes both."""
