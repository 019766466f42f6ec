"""OpenAI's Responses API over chats."""

from .routes import INNER, ROUTES
from .store import STORE, Store

__all__ = ["INNER", "ROUTES", "STORE", "Store"]
