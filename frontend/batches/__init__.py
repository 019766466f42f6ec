"""Batches: many requests in one file, answered in the background at low priority, and each of them once.

``journal`` keeps answers as they come, ``lines`` reads requests from a file, ``local`` answers one without HTTP,
``run`` answers all of a file; `quire run-batch` needs no more. ``store`` is the folder of /v1/files and /v1/batches,
``service`` runs what is in it, ``routes`` is what clients see of both.
"""
