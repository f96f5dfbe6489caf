"""MiniCPM-o 4.5 (openbmb/MiniCPM-o-4_5): hears, sees, decides each second whether to listen or to speak, and speaks.

Built from `transformers` parts under the names of the released checkpoint. `checkpoint` reads it, `hearing` and `seeing` make
embeddings, `deciding` chooses tokens, `voicing` makes sound codes of them, `native` is the model and its conversations.
"""
