"""The record of a run. events.py defines it; observer.py measures, sinks.py and progress.py write, health.py judges."""
