"""The front door for transformers users: `load`, and the model it returns."""
