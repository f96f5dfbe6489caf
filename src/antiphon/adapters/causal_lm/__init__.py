"""Language models that `transformers` runs as they are: one decoder, any checkpoint of it."""
