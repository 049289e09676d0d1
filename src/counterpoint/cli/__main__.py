"""`python -m counterpoint.cli`."""

from counterpoint.cli import main

main()
