"""The configuration of a run. schema.py and sections.py define the keys; load.py merges presets, files and flags."""
