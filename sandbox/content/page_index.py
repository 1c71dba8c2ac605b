"""The index of the page store: its tables, and how an index of an older version becomes one."""

from __future__ import annotations

import sqlite3

from sandbox.database import transaction

SCHEMA = """
CREATE TABLE IF NOT EXISTS segments (id INTEGER PRIMARY KEY, size INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS blocks (
    id INTEGER PRIMARY KEY, segment INTEGER NOT NULL, offset INTEGER NOT NULL,
    length INTEGER NOT NULL, count INTEGER NOT NULL, hash BLOB
);
CREATE INDEX IF NOT EXISTS blocks_by_segment ON blocks (segment);
CREATE TABLE IF NOT EXISTS pages (
    id INTEGER PRIMARY KEY, hash BLOB NOT NULL, owner TEXT NOT NULL DEFAULT '', UNIQUE (hash, owner)
);
CREATE TABLE IF NOT EXISTS lost (id INTEGER PRIMARY KEY, hash BLOB NOT NULL);
"""


def add_owners(database: sqlite3.Connection) -> None:
    """An index of an older version knows no owners: what it has is the host's own."""
    if any(column[1] == "owner" for column in database.execute("PRAGMA table_info(pages)")):
        return
    with transaction(database):
        database.execute("ALTER TABLE pages RENAME TO pages_before")
        database.execute(
            "CREATE TABLE pages (id INTEGER PRIMARY KEY, hash BLOB NOT NULL, owner TEXT NOT NULL DEFAULT '',"
            " UNIQUE (hash, owner))"
        )
        database.execute("INSERT INTO pages (id, hash) SELECT id, hash FROM pages_before")
        database.execute("DROP TABLE pages_before")
