"""Models on other servers, spoken to over HTTP. It is empty so far: the client of another server's API is one module
here.
"""
