"""What is computed: specs of models, the native decoder, and converting models to checkpoints.

- `spec`, `llama`: what the decoder has to know of a model, read from `config.json`.
- `rope`: cosines and sines of rotary position embeddings.
- `names`: the weights of a layer file, and the Hugging Face tensors they come from.
- `decoder`: the native decoder, a generator over layers.
- `sources`, `gguf_source`, `gguf_tokenizer`: models to convert.
- `modules`: architectures without a spec, through transformers' own modules.
- `convert`: a model to a checkpoint, a layer at a time.
"""
