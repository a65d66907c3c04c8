"""Benchmarks: `tercet bench` and `tercet sweep`."""
