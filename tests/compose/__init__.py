"""Containers on a real Docker engine: up, scaled, killed, restarted, under load."""
