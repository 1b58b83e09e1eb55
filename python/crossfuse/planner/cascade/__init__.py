"""Plans of cascades of reductions: which kernel computes one, and why that one."""
