"""Several streams of hidden states, and gates of few numbers, on the CPU."""
