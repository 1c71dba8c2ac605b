"""What `pagurus bench pools` plays over pools of engine servers."""
