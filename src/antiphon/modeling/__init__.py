"""Building blocks shared by several models: decoders, tokenizers, chat templates, grammars, codecs."""
