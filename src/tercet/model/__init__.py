"""The model: transformer, attention layers (nsa, dense), KV caches and decoding, loss, sampling, and its cost."""
