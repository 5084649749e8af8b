"""``python -m headmix`` is the command line."""

from headmix.cli import main

main()
