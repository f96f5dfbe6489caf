"""MiniCPM-o 4.5 (openbmb/MiniCPM-o-4_5): a native model, which each second decides by itself to listen or to speak.

Built from `transformers` parts under the parameter names of the released checkpoint. `checkpoint.py` reads it,
`audio_encoder.py` and `vision_encoder.py` make embeddings, `sampling.py` chooses tokens, `speech_decoder.py` makes
codes of them and `token2wav.py` audio of the codes; `model.py` is the model and its conversations.
"""
