import sqlite3

db = sqlite3.connect("/app/shop.db")
db.executescript("""
create table shells (id integer primary key, name text, price integer);
create table sales (shell integer, number integer, day text);
insert into shells values (1, 'moon', 5), (2, 'whelk', 7), (3, 'turban', 12);
""")
db.executemany(
    "insert into sales values (?, ?, ?)",
    [(1 + n % 3, 1 + n % 4, f"2026-0{1 + n % 2}-{1 + n % 28:02}") for n in range(200)],
)
db.commit()
