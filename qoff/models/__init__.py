"""What is computed: specs of models, the native decoder, transformers' modules, conversion."""
