"""Whole models on one GPU: `python -m bench.gpu_models --out DIR`, see bench/device.md."""
