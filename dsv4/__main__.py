"""`python -m dsv4`: the command line."""

from dsv4.cli.main import main

if __name__ == "__main__":
    main()
