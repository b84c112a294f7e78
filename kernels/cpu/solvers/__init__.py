"""What solvers of scales and codes do on the CPU's threads."""
