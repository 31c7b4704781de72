import gone  # noqa: F401
