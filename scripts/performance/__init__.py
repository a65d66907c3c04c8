"""The tables and plots of scripts/performance_tables.py, by topic."""
