"""Parts that several models are made of: decoders, tokenizers, chat templates, grammars, codecs."""
