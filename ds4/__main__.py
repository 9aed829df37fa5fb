"""`python -m ds4`: the same program as the `ds4` command."""

from ds4.frontends.cli import entry

if __name__ == "__main__":
    entry()
