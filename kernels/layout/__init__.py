"""How operands lie in memory: quantized matrices, ragged batches, the records of the KV cache."""
