"""What this server answers to, for programs: ``/openapi.json``, made of the structs of every route, and ``/docs``."""

from .document import routes

__all__ = ["routes"]
