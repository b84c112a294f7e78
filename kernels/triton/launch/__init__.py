"""What launchers share: the GPU at hand, tuned configurations, kernels as data to compile."""
