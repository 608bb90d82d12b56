"""Random arrays: stateful, from generators, and stateless."""
