"""Refuse files of a program that hide a library of the same name."""

import importlib.util


def refuse_shadow(library: str) -> None:
    """Raise if a single file, such as a program called ``jax.py``, hides a library.

    Without this the import goes in a circle, and its error names neither the file nor the reason.

    Args:
        library: The name of a library that is a package.

    Raises:
        ImportError: If the name leads to a file.

    Example:
        >>> from replicax._src.base.shadows import refuse_shadow
        >>> refuse_shadow("jax")
    """
    try:
        spec = importlib.util.find_spec(library)
    except ValueError:  # a module that a program has put together itself
        return
    if spec is None or spec.submodule_search_locations is not None:
        return
    raise ImportError(
        f"The file {spec.origin} hides the library {library}, because Python searches the folder of"
        " the program first. Give the file another name."
    )
