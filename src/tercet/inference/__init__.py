"""Load trained models, generate text, and evaluate them."""
