"""Turn taking: speech probabilities in, starts and stops of speech out. Pure."""
