"""The MLP of a mixture of experts on a GPU."""
