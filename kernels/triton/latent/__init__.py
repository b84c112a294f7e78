"""Multi-head latent attention on a GPU: heads' products, the cache of latents, attention to it."""
