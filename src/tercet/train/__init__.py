"""The trainer. Start with trainer.py, the loop over steps, and step.py, one optimizer update."""
