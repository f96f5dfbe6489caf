"""Sessions that are being served: each ties a protocol, a session and an attachment together."""
