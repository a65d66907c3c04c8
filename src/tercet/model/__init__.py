"""The model. Start with transformer.py; attention layers: nsa.py, block_sparse.py, window.py, dense.py."""
