"""An agent that knows nothing of Pagurus: mini-swe-agent from PyPI, in a sandbox, behind the gateway."""
