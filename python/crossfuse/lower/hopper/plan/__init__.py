"""Makes every decision about a kernel before any of it is emitted."""
