"""Training data: document streams, tokenizers, packing into sequences, batches. Start with loader.py and stream.py."""
