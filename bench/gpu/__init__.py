"""Every Triton op on one GPU: `python -m bench.gpu --out DIR`, see bench/device.md."""
