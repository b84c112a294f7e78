"""The ops on a GPU, in Triton. `ops` has them as the decoder calls them."""
