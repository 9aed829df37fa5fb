"""The control protocol between the head and its ranks: bytes in, events out.

No clock, no socket, no task and no thread is used anywhere in this package.
"""
