"""token2wav: codes to audio, for many streams at once, in the voice of a reference.

`voice.py` reads a voice from its reference. `flow.py` turns codes into mel frames, with the networks in `encoder.py`
and `dit.py`, whose keys and values are in the tables of `history.py`. `vocoder.py` turns mel frames into audio, with
the network in `hift.py`. `token2wav.py` joins them, and `files.py` reads the released files.
"""
