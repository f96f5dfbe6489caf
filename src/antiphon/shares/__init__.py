"""What keys share equally: places, threads, and entries of caches. Owners are API keys, and have turns."""
