"""What each op means, in plain torch; the other implementations are tested against it."""
