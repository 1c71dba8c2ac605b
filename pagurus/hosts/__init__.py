"""The verbs about hosts: what one can do, holds and lets in, and several as one."""
