"""Bodies of HTTP requests and responses, for chat completions and for transcriptions of files (see docs/wire)."""
