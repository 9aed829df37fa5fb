"""Exit statuses that all programs share."""

__all__ = ["EXIT_FAILED", "EXIT_INTERRUPTED", "EXIT_OK", "EXIT_USAGE"]

EXIT_OK = 0
EXIT_FAILED = 1
"""The run failed: a file, a device, or a comparison that did not hold."""
EXIT_USAGE = 2
"""The command line is wrong."""
EXIT_INTERRUPTED = 130
"""Ctrl+C ended the run; what was produced until then has been written."""
