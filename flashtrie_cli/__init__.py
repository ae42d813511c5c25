"""flashtrie: tries as the constraint of what a model may say."""

__version__ = "0.1.0"
