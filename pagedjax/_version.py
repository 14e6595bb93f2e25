"""The version, alone in a file so that the build reads it without importing jax."""

__version__ = "0.1.0"
