"""The implementation of replicax. Nothing here is public; `replicax` exports the public names."""
