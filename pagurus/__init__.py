"""The command-line program. Owns: parsing, printing, exit codes. Does not own: behaviour, which the libraries have."""

VERSION = "0.1.0"
