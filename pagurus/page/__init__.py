"""The page for people: its sources (`front`), what is built of them (`built`), and the server of `pagurus view`."""
