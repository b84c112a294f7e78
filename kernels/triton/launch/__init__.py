"""What launchers share: the GPU at hand, options for Triton, tuned configurations."""
