"""What functions say, block by block: read by detection, planning, rules and lowering alike."""
