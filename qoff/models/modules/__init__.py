"""Architectures without a spec, run through transformers' own modules.

Their checkpoints say so ("layout": "modules" in the quantization config).
"""
