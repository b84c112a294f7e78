"""The MLP of a mixture of experts on the CPU."""
