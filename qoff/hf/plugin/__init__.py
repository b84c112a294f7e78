"""qoff as a quantizer inside transformers: what `from_pretrained` and `save_pretrained` call."""
