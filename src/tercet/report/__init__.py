"""What a run folder says: verdict, pages, plots. Reads files only: no torch, no trainer, no process group."""
