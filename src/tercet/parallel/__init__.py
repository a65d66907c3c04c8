"""Training on several ranks. Interface: strategy.py. DDP and FSDP: distributed.py. Context parallelism: context.py."""
