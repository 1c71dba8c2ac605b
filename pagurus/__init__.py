"""The command-line program: parsing, printing and exit codes of what the libraries do."""

VERSION = "0.1.0"
