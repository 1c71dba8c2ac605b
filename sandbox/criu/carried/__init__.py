"""What CRIU does not carry, or carries slowly: kept at the dump and brought back by us."""
