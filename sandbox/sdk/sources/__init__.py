"""What a build is made from: contexts, addresses, git repositories."""
