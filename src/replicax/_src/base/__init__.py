"""The lowest layer: errors, lazy imports, threads, array functions and type specs."""
