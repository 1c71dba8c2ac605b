#!/bin/bash
set -e
python3 - <<'END'
import sqlite3
db = sqlite3.connect("/app/shop.db")
db.executescript('''
alter table shells add column sold integer not null default 0;
update shells set sold = (select coalesce(sum(number), 0) from sales where shell = id);
create trigger sold after insert on sales begin
  update shells set sold = sold + new.number where id = new.shell;
end;
''')
END
