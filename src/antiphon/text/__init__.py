"""Text on its way to a voice: sentences, and the times of words. Pure."""
