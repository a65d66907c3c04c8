"""Load trained models, generate text, and evaluate them. Start with load.py and generate.py."""
