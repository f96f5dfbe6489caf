"""The session engine: language-model sessions whose KV lasts as long as the conversation."""
