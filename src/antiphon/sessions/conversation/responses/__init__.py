"""The responses of a conversation: requested, generated, sent, and cut to the part that was heard."""
