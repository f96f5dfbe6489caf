"""token2wav: turns the codes of MiniCPM-o's code decoder into audio, with the weights of the released checkpoint."""
