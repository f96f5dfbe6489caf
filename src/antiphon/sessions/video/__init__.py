"""Video sessions: frames, audio and questions in, answers out."""
