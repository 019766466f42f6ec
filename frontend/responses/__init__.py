"""OpenAI's Responses API over chats."""

from .routes import ROUTES, STORE, Store

__all__ = ["ROUTES", "STORE", "Store"]
