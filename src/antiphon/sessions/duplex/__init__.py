"""Full-duplex sessions: conversations with acknowledged playback, epochs and decisions about overlaps."""
