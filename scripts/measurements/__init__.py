"""The parts of scripts/measure.py, by what they measure."""
