"""A conversation: the user's turns, the items, the answers and what was heard of them."""
