"""The page at ``/`` for people: chat with the model, and look inside the server. Hand-kept HTML, CSS and modules."""

from .serving import routes

__all__ = ["routes"]
