"""Command-line programs and servers. They use the names that `ds4` exports and nothing below."""
