"""The installed plugins, their claims, and this machine's devices."""
