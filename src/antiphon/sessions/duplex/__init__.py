"""Full-duplex sessions: a conversation with acknowledged playback, epochs and decisions about overlaps."""
