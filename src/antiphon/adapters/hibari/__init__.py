"""hibari: English voices that are synthesized in chunks, with the time of every word."""
