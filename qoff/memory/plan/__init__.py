"""Which weights stay on the device, which stream, from where, and how they lie in memory."""
