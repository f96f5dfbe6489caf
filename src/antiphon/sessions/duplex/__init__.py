"""Full duplex: a conversation with acknowledged playback, epochs and overlap."""
