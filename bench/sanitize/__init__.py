"""AddressSanitizer and ThreadSanitizer for the CPU kernels."""
