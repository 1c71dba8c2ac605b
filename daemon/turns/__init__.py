"""What happens in one live sandbox, in order: commands, sessions, programs, turns."""
