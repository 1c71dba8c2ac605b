"""Engine servers as one: the pool, its members, the doors for agents in the words of OpenAI and Anthropic."""
