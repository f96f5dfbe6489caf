"""The session engine: it runs language-model sessions whose KV lives as long as the conversation."""
