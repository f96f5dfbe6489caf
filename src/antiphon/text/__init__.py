"""Text on its way to a voice: splitting it into sentences, and estimating the times of its words. Pure."""
