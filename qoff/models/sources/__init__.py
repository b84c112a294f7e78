"""What a conversion reads from: safetensors, quantized checkpoints, GGUF files."""
