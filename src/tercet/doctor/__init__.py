"""Examines a machine before a run is trusted to it: every finding comes with its mend."""
