"""One trajectory: its turns, its sandbox, its journal, its clock."""
