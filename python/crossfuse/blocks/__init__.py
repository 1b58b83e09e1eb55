"""Facts about functions, block by block, for detection, planning, rules and lowering alike."""
