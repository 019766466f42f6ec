"""Blocks that have left the device's cache: kept in host memory and on disk, and moved beside the steps."""
