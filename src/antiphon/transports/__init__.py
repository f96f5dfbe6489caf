"""Transports of frames: WebSocket, WebRTC, and the attachment of one transport at a time to a live session."""
