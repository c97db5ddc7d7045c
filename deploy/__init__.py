"""The composition root: the command line, start-up and shutdown of a deployment."""
