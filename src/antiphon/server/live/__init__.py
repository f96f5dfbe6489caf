"""Sessions that are being served: each ties a wire, a session and an attachment together."""
