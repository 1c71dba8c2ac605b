"""The LLM gateway of a host: between agents and the models that they believe to speak to.

::

    agent ──request──▶ listener ──▶ line: which turn, which exchange? ──▶ end of turn: judge ▸ checkpoint begins
      ▲                (who asks)     │            │ answered before, on this path                │      (overlaps)
      │                               │            ▼                                           │
      │                               │         journal ◀──── answer, whole ◀── upstream ◀─────┘
      └── answer, once the state before it is captured (or durable) ◀──────────────┘

`wire` and `replay` decide and touch nothing; `journal` remembers; `upstream` asks; `answer` holds the answers;
`line` is the conversation of one sandbox; `listener` knows who asks; `service` joins them.
"""
