"""`python -m quantshard` is the command `quantshard`."""

from quantshard.cli import main

if __name__ == "__main__":
    main()
