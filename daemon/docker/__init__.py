"""Docker's Engine API inside of a sandbox: its containers are services of that sandbox, and of no other.

`bodies` says how what clients ask for becomes a service, and a service what they are shown; `engine` serves one
sandbox; `streams` are the connections of commands; `service` has the listeners.
"""
