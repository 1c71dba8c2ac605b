"""Pages that show who did what when: lanes of bars over time, with tables of what the time went to.

`drawing` draws any of them; `chart` is the page of a run: its trainer, its engines, its trajectories.
"""
