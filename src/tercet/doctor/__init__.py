"""`tercet doctor`: check a machine before training on it. Every problem comes with a fix."""
