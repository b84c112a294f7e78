"""Keys hidden in long texts, and whether the model finds them."""
