"""Converting a model to a qoff checkpoint, a layer at a time."""
