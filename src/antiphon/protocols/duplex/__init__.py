"""Full duplex: the OpenAI conversation with epochs, acknowledged playback and turn states."""
