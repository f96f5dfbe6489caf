"""How frames travel: WebSocket, WebRTC, and the attachment of one transport at a time to a live session."""
