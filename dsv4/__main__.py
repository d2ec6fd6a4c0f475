"""`python -m dsv4`: the command line."""

from dsv4.serve.cli import main

if __name__ == "__main__":
    main()
