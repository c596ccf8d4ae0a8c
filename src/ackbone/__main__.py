"""`python -m ackbone`."""

from ackbone.cli import main

if __name__ == "__main__":
    main()
