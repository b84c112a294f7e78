"""The native decoder: a forward pass as few large ops, for every model that has a spec."""
