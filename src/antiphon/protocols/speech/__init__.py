"""Speech synthesis: the stream's messages, and the REST twins."""
