"""Models on other servers, spoken to over HTTP. Empty so far: a client of another server's API is one module here."""
