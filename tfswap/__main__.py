"""`python -m tfswap`: the command line."""

from tfswap.frontends.cli import run

if __name__ == "__main__":
    run()
