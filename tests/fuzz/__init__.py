"""Bytes that nobody should send, to every socket and route: what makes them, who sends them, and what must hold."""
