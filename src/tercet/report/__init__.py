"""Reports on run folders: verdict, HTML pages, plots, live view. Only reads files; needs neither torch nor a GPU.

Start with verdict.py; gates.py says what a gate is.
"""
