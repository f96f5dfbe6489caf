"""The responses of a conversation: asked for, generated, sent, heard, and cut to what was heard."""
