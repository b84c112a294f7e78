"""Where packed blocks are stored: growing host memory, or device, host and disk of fixed sizes."""
